"""What happens in a story? Each plot is a run of beats, and a beat is one of its lines.

A blank line ends a beat. `==` begins a paragraph; `EARLY`, `WAY` and `LATE` are the places where
a sentence may be woven in. A line `-` says nothing. The hero is N (he, him, his), the friend M
(mhe, mhim, mhis); the notation is that of `patterns`.
"""

OPENING = """
Once upon a time, there was a~ {trait} {kind} named {N}. {He} lived [near|close to] the {place}.
Once upon a time, a~ {trait} {kind} called {N} lived [near|close to|beside] a~ {land} {place}.
Long ago, [near|close to] a~ {land} {place}, there lived a~ {trait} {kind}. {His} name was {N}.
{N} was a~ {trait} {kind} who lived [near|beside|not far from] the {place}.
In a <house> near the {place} lived a~ {kind} named {N}. Everyone [knew|said] that {he} was {trait}.
There was once a~ {kind} named {N}. {He} was so {trait} that everyone near the {place} knew {him}.
A~ {trait} {kind} named {N} had a <house> [near|beside] the {place}.
Do you know the story of {N}? {He} was a~ {trait} {kind} and lived near a~ {land} {place}.
{N} was a~ {kind}. {He} was {trait}, and {he} lived in a <house> near the {place}.
Not far from the {place}, in a <house>, lived a~ {trait} {kind}. {His} name was {N}.

-
-
{He} liked to {act1} and to {act2}.
[Most of all|More than anything], {he} loved to {act1}.
Every morning {he} liked to {act1} [before breakfast|in the fresh air|for a while].
{His} best days were those when {he} could {act1} [all morning|until dark|with the neighbors].
When {he} was not busy, {he} liked to {act1}[ or {act2}|].
"""

LOST = """
{N} had a~ {look} {thing}, and {he} [loved it very much|took it everywhere|thought it brought luck].
The thing {he} loved most was a~ {look} {thing}[ from {his} <relative>|].
{His} <relative> had given {him} a~ {look} {thing}, and {he} [took it everywhere|kept it by \
{his} bed].
{He} owned a~ {look} {thing} and would not have given it away for [anything|all the gold in the \
world].

EARLY

==

{Day}, {he} [woke up|came home|looked around], and the {thing} was gone.
{Day}, {N} wanted to show the {thing} to a neighbor, but it was not in its place.
But {day}, the {thing} was [gone|nowhere to be seen|not where it should be].

"Oh no! Where is my {thing}?" {he} [cried|asked|said].
"My {thing} is gone!" {he} [cried|said]. [A tear ran down {his} face.|{His} heart beat fast.]
{He} felt very {sad}. "What shall I do without my {thing}?" {he} [said|asked].

{He} looked <where> and even <odd>, but {he} [could not find it|found nothing at all].
{He} searched <where> and <odd>. [There was no {thing} anywhere.|It was not there.|Nothing!]
First {he} looked <where>. Then {he} looked <odd>. [It was no use.|The {thing} was not there.]

WAY

[Then|Soon|A little later] {he} met {M}, a~ {mtrait} {mkind}. "Why do you look so {sad}?" asked {M}.
[On the path|Outside] {he} met a~ {mtrait} {mkind} named {M}. "What is the matter?" asked {M}.
[Just then|At that moment], a~ {mtrait} {mkind} came by. It was {M}. "What are you doing?" {mhe} \
asked.

"I have lost my {thing}," said {N}[ in a small voice| sadly|].
"Someone has taken my {thing}, or I have lost it," [said|answered|replied] {N}.
"I am looking for my {thing}," [said|answered] {N}. "[It is all I have|I cannot find it anywhere]."

"[Do not worry|Do not cry|Cheer up]," said {M}. "[We will find it together|I will help you look]."
{M} thought for a moment. "Where did you last see it?" {mhe} asked. "{In_place2}," said {N}.
"Two pairs of eyes are better than one," said {M}. "Come, let us look together."

==

So [the two of them|they] went to the {place2} and [looked everywhere|searched for a long time].
Side by side, they walked to the {place2}. They [looked under every leaf|turned over every stone].
They [hurried|walked] to the {place2} and asked everyone they met.

After a while {M} [stopped and pointed|looked up]. A~ {third} was [playing with|holding] the \
{thing}!
At last they [came to|met] a~ {third}, and beside it lay the {thing}!
Suddenly {N} saw a~ {third}, and the {third} had [the {thing}|something {look}. It was the {thing}]!

"I found it [by the road|in the mud|under a bush]," said the {third}. "I did not know whose it was."
"Is this yours?" asked the {third}. "[I kept it safe|I wanted to give it back|I found it here]."

{N} [jumped for joy|laughed with relief]. "Thank you[, thank you| so much| both]!" {he} said.
"That is my {thing}!" [shouted|cried] {N}. {He} [hugged it|held it tight] and thanked them both.

LATE

From that day on, {he} [always put the {thing} back in its place|took good care of the {thing}].
{N} had the {thing} back, and [even better, |]{he} had found a new friend.
{N} learned that [it is good to ask for help|two friends find more than one].
"""

SKILL = """
{N} had one [great|big|secret] wish: {he} wanted to learn to {skill}.
More than anything, {he} wanted to {skill}, but {he} did not know how.
All {his} neighbors could {skill}, but {N} could not.
"One day I will {skill}," {N} [always said|said every evening], but {he} had never learned how.

EARLY

==

{Day}, {he} tried it [all alone|again and again], but [nothing worked|it was much too hard].
{Day}, {he} went to the {place} to try it, but [it went wrong every time|it did not work].
{Day}, {he} went outside and tried to {skill}, but [it was a disaster|{he} could not do it].

A~ {third} [saw it and laughed|laughed at {him}]. "You will never {skill}!" [it|the {third}] said.
"That looks funny!" called a~ {third}[ from behind a tree|]. "Give up! You will never {skill}!"
"Stop that!" said a~ {third}. "[Not everyone can {skill}|It hurts my eyes to watch you]."

{N} felt {sad} and [sat down on a stone|walked away slowly|hung {his} head].
{N} went away [slowly|without a word]. {He} felt very {sad}.

WAY

{In_place2}, {he} met {M}, a~ {mtrait} {mkind}. "Why are you so {sad}?" asked {M}.
[Just then|After a while], a~ {mtrait} {mkind} named {M} came by. "What is wrong?" asked {M}.

"I want to {skill}, but I cannot do it," said {N}[ with a sigh|].
"I will never learn to {skill}," [said|answered] {N}. "Everyone laughs at me."

==

"I could not {skill} [at first|when I was young] either," said {M}. "[It takes time|I will show \
you how]."
"[Nobody can do everything on the first day|We all begin small]," said {M}. "Come, I will teach \
you."
{M} smiled. "I know how to {skill}," {mhe} said. "Would you like me to teach you?"

So they practiced [every day|every morning|day after day] {in_place2}.
From then on, they met {in_place2} every [day|evening] and practiced together.

At first, {N} made many mistakes, but {M} [was patient.|only smiled.|said, "Try again!"]
On the first day, {N} wanted to give up, but {M} [would not let {him}|told {him} to go on].

[Little by little|Day by day|Slowly], {N} got better.
-

[Then, one <weather> day|After a week|At last], {N} could {skill} [all alone|as well as {M}|with \
ease].
And then it happened: {N} could {skill}[, and it was not even hard|]!

"Look! I can {skill}!" {he} [shouted|called|cried][ as loudly as {he} could|].
"I did it!" {he} [shouted|called|cried]. "[I can really {skill}!|Did you see that?]"

LATE

Even the {third} [was amazed.|said, "Well done!"|asked {N} for a lesson.]
-

{N} had learned that [practice helps more than luck|a good teacher is worth more than gold].
{N} never forgot who had helped {him}, and later {he} taught many others to {skill}.
Now {N} was {happy}, because {he} had not given up.
"""

JOURNEY = """
{N} had never seen the {place2}, and {he} dreamed of it [every night|all day].
{His} <relative> had told {him} [many stories about the {place2}|that the {place2} was wonderful].
"One day I will go to the {place2}," {he} told everyone.

EARLY

==

{Day}, {he} packed a~ {look} {thing} and [some food|a little water], and [set off|left home].
{Day}, {N} put a~ {look} {thing} into a bag and [left home|started to walk|set off].
{Day}, {he} took {his} {look} {thing}, closed the door and [set off|started on the long road].

WAY

[After a while|Soon|Before noon], {he} came to {obstacle}. {He} did not know how to go on.
Everything went well until {he} came to {obstacle}. [What now?|{N} stopped.|That was bad luck.]

{He} felt {sad} and thought about [going home|turning back].
"[This is the end of my journey|Now I must go home again]," {he} thought, and {he} felt {sad}.

[Then|Just then] a~ {mtrait} {mkind} came along. "I am {M}," said the {mkind}. "Can I help you?"
"Hello there!" called someone. It was {M}, a~ {mtrait} {mkind}. "[Are you lost|Do you need help]?"

"I want to see the {place2}, but I cannot go any farther," said {N}.
"I am on my way to the {place2}," [said|answered] {N}, "but [here I am stuck|I cannot go on]."

{M} {knew}. "Follow me," {mhe} said[ kindly|], and [soon|a moment later] they {crossed}.
"I know what to do," said {M}, who {knew}. [Soon|A little later] they {crossed}.

[To say thank you|In return], {N} gave {M} the {look} {thing}.
"Take my {thing} as a thank-you," said {N}. {M} was {happy}.
-

==

They walked on together [until the evening|until their feet hurt], and then they saw the {place2}.
Now they were two, and the road seemed short. [At last|In the evening] they came to the {place2}.

It was [even more beautiful|far more wonderful] than [in {N}'s dreams|{N} had thought].
There it was, right in front of them, and it was [lovely|wonderful|better than any dream].

"[We made it|Here we are|Look at that]!" [said|shouted|cried] {N}.
They sat down and looked at it [for a long time|without a word].

LATE

{N} knew that [the best part of the trip was {his} new friend|a long road is short with a friend].
On the way home, {N} and {M} [sang|laughed|made plans for their next trip].
"Where shall we go next?" asked {M}, and they both laughed.
"""

LONELY = """
But {N} had no friends, [because {he} was new there|and the days were long].
Every day {he} [played|sat] alone with {his} {look} {thing}. {He} had nobody to talk to.
"I wish I had someone to play with," {he} [often said|thought every day].

EARLY

==

{Day}, a new neighbor came to the {place}. It was {M}, a~ {mtrait} {mkind}.
{Day}, {he} saw someone new at the gate. It was a~ {mtrait} {mkind} named {M}.

{N} wanted to say hello, but {he} [was too shy|did not dare|did not know what to say].
"[What if {mhe} does not like me|What if {mhe} laughs at me]?" thought {N}.

So {he} hid [behind a tree|behind a wall|under a bush] and watched.
{He} went home [quickly|without a word], and {he} felt {sad}.

The next day, {N} [went to the {place2}|took a walk to the {place2}].
The days went by. Then, one <weather> day, {N} walked to the {place2}.

WAY

There sat {M}, all alone, [and {mhe} looked {sad}|with tears in {mhis} eyes].
There {he} saw {M}, who [was crying|looked {sad}|was sitting all alone].

"[What is wrong|Are you all right]?" asked {N}. {He} forgot to be [shy|afraid].
{N} took a deep breath. "Can I help you?" {he} asked.

"I do not know anybody here," said {M}. "[Nobody talks to me|I think nobody likes me]."
"I feel so alone," said {M}. "Everyone here has a friend, but I have none."

"I thought I was the only one!" said {N}. "Would you like to see my {look} {thing}?"
"Then we are two," said {N}. {He} [took out|showed {M}] a~ {look} {thing}. "Shall we play?"

==

{M} [smiled|nodded|dried {mhis} eyes], and they played until [it was dark|the stars came out].
How they laughed! They talked and played until [the sun went down|it was time for dinner].

They found out that they both liked to {act1}.
{M} told {N} that {mhe} also liked to {act1}.
-

The next morning they met again, and the morning after that too.
"Will you come again tomorrow?" asked {M}. "Of course," said {N}.

LATE

After that, {N} was never lonely again.
Sometimes a friend is only one hello away.
From that day on, they were best friends.
"""

RESCUE = """
{N} thought that {he} was too {weak} to do anything great.
"You are too {weak} to help," the others always told {N}.
Nobody believed that {N} could do anything important, and {he} did not believe it either.

EARLY

==

{Day}, {he} was on {his} way to the {place2}.
{Day}, {he} walked to the {place2} with {his} {look} {thing}.
{Day}, {he} set out for the {place2} to look for {food}.

WAY

Suddenly {he} heard [a cry|a voice]. "Help! Help!"
Then {he} heard someone [call|shout]. "Is anybody there? Please help me!"

{He} ran toward the sound and saw {M}, a~ {mtrait} {mkind}, who {trapped}.
It was {M}, a~ {mtrait} {mkind}, who {trapped}.

"I have been here since [last night|this morning]," said {M}. "[Nobody heard me|I am so cold]."
"Please do not go away," said {M}. "I cannot get out by myself."
-

{N} was afraid, [and {his} legs shook|and {his} heart beat fast], but {he} did not run away.
"I am too {weak} for this," thought {N}. But there was nobody else.

{He} thought hard. Then {he} had an idea.
Then {he} remembered what {his} <relative> had once told {him}.
-

{He} found a long branch and held it out to {M}. "Hold on!" {he} [shouted|called].
{He} tied a rope to a tree and threw one end to {M}. "Hold tight!" {he} [shouted|called].
{He} called a~ {third}, and together they held out a long branch.

{N} pulled and pulled [with all {his} strength|and did not let go]. At last {M} was free.
It was hard work, but {N} did not let go. Slowly, very slowly, {M} came out.

==

"You saved me!" said {M}. "You are [a hero|very brave]."
{M} [took a deep breath|laughed and cried at once]. "Without you I would still be there," {mhe} \
said.

{N} smiled. "[I was afraid the whole time|I only did what anyone would do]," {he} said.
"[I was scared|My heart is still beating fast]," said {N}. "But I could not leave you alone."

"To be brave is to be afraid and to help anyway," said {M}.
To say thank you, {M} gave {him} a~ {look} {thing2}.
-

LATE

From then on, nobody said that {N} was too {weak} for great things.
When the others heard about it, they were {happy} and [a little ashamed|proud of {N}].
{N} and {M} often met after that, and they always [laughed|talked] about that day.
"""
