"""What else happens in a story? In the notation of `plots`."""

QUARREL = """
EARLY

{N}'s best friend was a~ {mtrait} {mkind} named {M}. They [did everything together|met every day].
{N} had a good friend, a~ {mtrait} {mkind} named {M}. [They never fought.|They shared everything.]

==

{Day}, the two friends walked to the {place2}.
{Day}, they [went|took a walk] to the {place2} together.

WAY

There they [found|saw] a~ {look} {thing} [on the ground|in the grass|under a tree].
Suddenly they both saw it: a~ {look} {thing} [on the ground|in the grass].

"It is mine! I saw it first!" [said|shouted] {N}. "No, it is mine!" [shouted|cried] {M}.
"I saw it first," said {M}. "No, I did!" [said|shouted] {N}. Nobody wanted to give in.

They pulled at the {thing} from both sides until it [fell into a deep hole|flew over a high wall].
They fought so long that the {thing} slipped away and [rolled into the bushes|fell into a ditch].

They went home angry. {N} felt {sad} [and could not sleep|and did not want to eat].
"I never want to see you again!" said {M}. That night, {N} [could not sleep|felt {sad}].

"There are many {look} things," {he} thought, "but there is only one {M}."
"A~ {thing} is only a~ {thing}," {he} thought. "A friend is much more."

==

The next morning, {he} ran to {M}. "I am sorry," {he} said. "[You matter more to me|I was wrong]."
At sunrise, {he} stood at {M}'s door. "I am sorry that I shouted at you," {he} said.

"I am sorry too," said {M}. "[I missed you|I should have shared it]."
{M} [smiled|hugged {him}]. "I wanted to say the same," {mhe} said.

Together they went back. With [a long stick|a rope|the help of a~ {third}] they got the {thing} \
back.
They went back and looked for the {thing}. A~ {third} had found it and gave it to them.

"You can have it today, and I can have it tomorrow," said {N}.
They agreed to share it: one day it was for {N}, and the next day it was for {M}.
"Let us give it to someone who has nothing," said {M}, and {N} agreed.

LATE

It was much more fun to play together than to be right.
After that, they still fought sometimes, but never for long.
Both of them were {happy}, because they were friends again.
"""

GIFT = """
EARLY

{N}'s best friend was {M}, a~ {mtrait} {mkind}. Soon it would be {M}'s birthday.
It was almost the birthday of {N}'s best friend {M}, a~ {mtrait} {mkind}.

But {N} had no money [for a gift|to buy a gift], and {he} was {sad}.
"What can I give to {M}?" {N} asked {his} <relative>. "I have no money."

==

{N} went to the {place2} to look for [something nice|a gift].
{He} walked all the way to the {place2} to find [something pretty|something special].

WAY

{He} found [a bit of string|some wood|some colored paper], <bits> and <scraps>.
There was not much to find: [a bit of string|some old cloth], <bits> and <scraps>.

"Nobody wants such old things," said a~ {third} [with a laugh|that was walking by].
"What do you want with that?" asked a~ {third}. "It is only trash."
-

"I can make something out of this," said {N}[ to {himself}|].
{N} looked at it all for a long time. Then {he} had an idea.

All [evening|afternoon] {he} cut, glued and painted. In the end, {he} had made a~ {look} {thing}.
{He} worked until [midnight|the candle was almost gone], and then a~ {look} {thing} was ready.

It was a little [crooked|rough], and {N} was [nervous|not sure if {M} would like it].
It was not perfect, but {he} had done {his} best.

==

On the birthday, everyone brought [big|expensive] presents. {N} [came last|held {his} breath].
At the party, {N} waited until the end. Then {he} gave {M} the {thing} and looked at the floor.

"Did you make this {thing} yourself?" asked {M}. {N} nodded.
{M} looked at the {thing} [from all sides|for a long time]. "Who made this?" {mhe} asked. "I \
did," said {N}.

"[It is the best gift of all|I will keep it forever]," said {M}, "because you made it for me."
"[This is wonderful|Nothing could be better]!" said {M}, and {mhe} gave {N} a big hug.

LATE

{N} felt warm and {happy}. The best gifts cannot be bought.
From then on, the {thing} stood in the middle of {M}'s room.
{N} learned that a gift does not have to be [big|expensive] to be good.
"""

NOISE = """
There was only one problem: {N} was afraid of {fear}.
{He} was not afraid of storms or of strangers, but {he} was afraid of {fear}.

EARLY

==

One night, {he} heard a strange noise [on the roof|behind the wall|outside the window]. <noise>
In the middle of the night, {he} woke up. There was a noise [at the door|on the stairs]. <noise>

"[Is it a monster|Is it a ghost|Who is there]?" {he} whispered[, but nobody answered|].
{N} pulled the blanket over {his} head. "Maybe it will go away," {he} thought.

The noise [came again|grew louder]. {N} [could not sleep|was shaking with fear].
But the noise did not stop.

[In the end|At last], {he} took {his} {look} {thing} and [ran|went] to {M}, a~ {mtrait} {mkind} \
next door.
{He} took {his} {look} {thing} to feel braver and called {M}, the {mtrait} {mkind} from next door.

"[Do not be afraid|A noise cannot hurt you]," said {M}. "[Let us see what it is|We will look \
together]."
{M} listened. "[That is strange|I hear it too]," {mhe} said. "Let us find out what it is."

==

[Step by step|Very slowly], they [crept|walked] toward the noise.
They [lit a candle|held each other tight] and [looked around the corner|went closer and closer].

There, [in a corner|between two boxes|behind a barrel], sat a~ {third}!
It was no monster. It was only a~ {third}!

"I am sorry," said the {third}. "I [only wanted to get warm|was looking for food|lost my way]."
"Please do not be angry," said the {third}. "I [am so hungry|could not find my way home]."

{N} [had to laugh|laughed with relief]. "And I thought you were a monster!" {he} said.
"Is that all?" asked {N}. {He} was so {happy} that {he} laughed out loud.

{N} gave the {third} [some bread|a blanket|some soup], and [then|soon] they all told stories.
They gave the {third} something to eat and sat together [until sunrise|by the fire].

LATE

After that, {N} was not afraid of {fear} any more.
"Next time, look first and be afraid later," said {M}, and they all laughed.
Now {N} knows that most monsters are only [hungry|cold] guests.
"""

RACE = """
Every year there was a great race from the {place} to the {place2}.
Soon there would be a big race to the {place2}, and {N} wanted to take part.

The winner would get a~ {look} {thing}.
The prize was a~ {look} {thing}, and {N} wanted it very much.

EARLY

==

{Day}, all the runners [stood at the start|lined up]. One of them was {M}, a~ {mtrait} {mkind}.
{Day}, the race began. The fastest runner of all was {M}, a~ {mtrait} {mkind}.

"[You have no chance|You will be last]," {M} told {N} [with a proud smile|and laughed].
"You run like a~ <slow>," said {M}. {N} said nothing.

"Ready, steady, go!" shouted a~ {third}, and [off they went|everyone ran].
A~ {third} rang a bell, and off they went.

WAY

{M} was soon [far ahead|out of sight]. But then {mhe} [tripped over a stone|slipped] and fell.
{M} ran so fast that {mhe} did not see a hole in the road. {Mhe} fell and could not get up.

The others ran past and did not stop. Only {N} stopped. "Are you hurt?" {he} asked.
One after another, the runners passed. But {N} stopped and asked, "Can you stand?"

"My foot hurts," said {M}. "[Go on, or you will lose|Run, you can still win]!"
"Why did you stop?" asked {M}. "You could have won!"

"[A race is only a race|I do not leave anyone behind]," said {N}, and {he} helped {M} to {mhis} \
feet.
"Winning alone is no fun," said {N}. "Lean on me, and we will walk together."

==

They were the last to arrive, but [everyone cheered|the crowd clapped and clapped].
Side by side, they came in last. For a moment it was quiet. Then everyone cheered.

The {third} gave {N} the {look} {thing}. "This is for the kindest runner," it said.
"The real winner is the one who helps," said the {third}, and it gave {N} the {thing}.

"I am sorry that I laughed at you," said {M}. "[Can we be friends|Will you be my friend]?"
{M} [looked ashamed|hung {mhis} head]. "I was not nice to you," {mhe} said. "Thank you."

"[Of course|Gladly]," said {N}[ with a smile|].
"That is all right," said {N}[ with a smile|]. "Next year we will run together."

LATE

Since that day, nobody remembers who came first, but everyone remembers {N}.
{N} did not win the race, but {he} won a friend.
"""

MISTAKE = """
EARLY

Next door lived {M}, a~ {mtrait} {mkind}. {M} was very proud of a~ {look} {thing}.
{N}'s neighbor {M}, a~ {mtrait} {mkind}, had a~ {look} {thing}. Nobody was allowed to touch it.

==

{Day}, {N} picked up the {thing} without asking. It slipped and fell. [Crack!|Crash!|Snap!]
{Day}, {N} was alone with the {thing}. {He} only wanted to look at it, but it fell. [Crack!|Crash!]

The {thing} was broken. "Nobody saw me," thought {N}, and {he} hid the pieces <hidden>.
Now it was in pieces. {N} was afraid. {He} hid the pieces <hidden> and [ran away|went home].

To forget about it, {he} walked to the {place2}.
{He} went for a long walk to the {place2}, but {he} could think of nothing else.

WAY

That evening, {M} came by. "Someone has broken my {thing}," {mhe} said. "Do you know who it was?"
In the evening, {M} stood at the door. "My {thing} is gone," {mhe} said. "Have you seen it?"

"No," said {N}, and {his} [cheeks|ears] grew hot.
{N} shook {his} head, but {he} could not look at {M}.

That night, {he} could not sleep. The lie was heavier than a stone.
{N} felt {sad}. Even {his} favorite food had no taste.

==

[In the morning|The next day], {he} brought the pieces to {M}. "I broke it," {he} said. "I am so \
sorry."
At sunrise, {he} went to {M}. "It was me," {he} said. "I broke the {thing}, and I lied to you."

{M} was quiet for a [moment|while]. "I am glad that you told me the truth," {mhe} said[ then|].
"I am sad about the {thing}," said {M}, "but I am proud that you told me the truth."

Together they [glued the pieces|mended it]. It took all day, but then the {thing} was whole again.
They sat down together and mended the {thing}. One small crack stayed, but nobody minded.

LATE

{N} felt light and {happy} again. The truth is hard for a minute, but a lie is hard for a long time.
{N} never lied to {M} again, and they became good friends.
"Next time, just ask me," said {M}, and from then on {N} always asked first.
"""

GARDEN = """
{Day}, {he} found a [tiny|strange|big] seed {in_place2}. "I wonder what will grow out of it," \
{he} said.
{His} <relative> gave {him} a [tiny|strange] seed. "Take good care of it," [{he}|{N}] was told.

{N} planted it [behind the house|near the gate] and watered it every day.
{He} put it into the earth and laid a~ {look} {thing} beside it to mark the place.

EARLY

==

The first week, nothing happened. The second week, nothing happened either.
Days went by, and nothing came out of the ground.

"You are wasting your time," said {M}, a~ {mtrait} {mkind} from next door.
{M}, a~ {mtrait} {mkind} from next door, laughed. "[It is only a stone|Nothing will ever grow \
there]!"

"Good things take time," said {N}, and {he} [did not give up|went on].
But {N} shook {his} head. "I will wait," {he} said.

Every morning {he} went to the {place2} to get fresh water.
When it grew dry, {he} walked to the {place2} to find water.

WAY

Then, one <weather> morning, a green leaf came out of the ground. It grew and grew.
After a month, there was a tiny green plant. Every day it was a little taller.

Soon it was [taller than the house|as tall as a tree] and full of [red berries|golden \
apples|sweet pears].
By summer it was a tree, and it was full of [sweet plums|golden apples|red cherries].

==

{M} stood at the fence and looked at the fruit. "I was wrong," {mhe} said[ quietly|].
{M} came by with a~ {look} {thing2}. "I am sorry that I laughed," {mhe} said. "This is for you."

{N} could have laughed, but {he} filled a basket for {M}. "There is enough for everyone," {he} said.
"Come and eat with me," said {N}. "It is no fun to eat alone."

They ate together [under the tree|in the shade] and planted ten new seeds.
A~ {third} smelled the fruit and came too. They all ate until they were full.

LATE

{N} was {happy}. {He} had waited a long time, and it had been worth it.
Today there is a whole garden there, and everyone may eat from it.
"""

STORM = """
{His} home was [small|very small], but [it was dry and warm|there was always a fire].
{He} lived alone with {his} {look} {thing}, and {he} [seldom had guests|did not like visitors].

EARLY

==

One [winter|autumn] evening, a great storm came over the {place}. The wind [howled|roared].
One night, it [rained|snowed] as never before. The wind shook the roof.

{N} sat by the fire with {his} {look} {thing}. Then [there was a knock|someone knocked] at the door.
"What a night!" said {N}. Just then there was a knock at the door.

Outside stood {M}, a~ {mtrait} {mkind}, [wet and cold|shaking with cold].
{N} opened the door a little. There stood a~ {mtrait} {mkind} named {M}, [wet and cold|all alone].

"The storm took my roof," said {M}. "May I come in?"
"I was on my way to the {place2}, and I lost my way," said {M}. "May I stay here tonight?"

There was only one bed, but {N} [did not think long|nodded]. "Come in," {he} said.
{N} looked at {his} small room. "There is always room for one more," {he} said.

Soon there was another knock. This time it was a~ {third}. "Come in, come in!" called {N}.
An hour later, a~ {third} came too, and then {his} neighbors. In the end, seven guests sat by \
the fire.

It was [crowded|a little tight], but nobody was cold. {M} told [funny|long] stories all night.
They made soup for everyone, and {M} told stories about the {place2}.

==

In the morning, the sky was blue again. {N} went with {M} to look at the damage.
The next day, the storm was over, and {M} could travel again. {N} went with {mhim} part of the way.

WAY

Then they built a new [roof|door] for {M}'s home, and even the {third} helped.
{N} gave {his} {look} {thing} to {M}, so that {mhe} would not forget that night.

LATE

"Your home is small, but your heart is big," said {M}.
After that, there were often guests in the little home, and {N} was {happy} about it.
"""

ENDING = """
-
-
That night, {N} [slept well|fell asleep with a smile].
If you go to the {place} one day, you may meet {N} and {M} there.
{N} and {M} [were friends for the rest of their lives|stayed friends for many years].
And that is the story of {N} and {M}.
{N} told this story to [everyone|all the neighbors], and now you know it too.
"""
