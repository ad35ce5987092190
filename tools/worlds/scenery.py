"""Which sentences bring a given word into a story? One line per choice, in `patterns` notation.

The word is `{x}`. EARLY is before the story begins to move, WAY while the hero is on the way,
LATE when all is well and hero (N) and friend (M) are together.
"""

from __future__ import annotations

Slot = str
SLOTS = ("EARLY", "WAY", "LATE")

WOVEN: dict[str, dict[Slot, str]] = {
    "animal": {
        "EARLY": """A~ [old|lazy|wise] {x} lived next door.
In the evenings, {he} often talked with a~ {x} that lived nearby.
The neighbors were quiet, apart from one noisy {x}.""",
        "WAY": """By the path there was a~ {x} that [was fast asleep|looked up in surprise].
A~ {x} crossed the path [and disappeared|in a hurry].
Not far away, a~ {x} was [taking a nap|looking for food].""",
        "LATE": """A~ {x} heard the news and [was happy for them|danced around them].
Even the old {x} from next door came to [celebrate|join them].
A~ {x} came by and asked what all the noise was about.""",
    },
    "person": {
        "EARLY": """One of the neighbors was a~ {x}.
{He} had a neighbor, a~ [old|friendly|famous] {x}.
Sometimes a~ {x} came by and told {him} the news.""",
        "WAY": """A~ {x} came down the road and waved.
By the path stood a~ {x} who was [looking at the sky|counting coins|eating lunch].
A~ [old|tired] {x} was resting under a tree.""",
        "LATE": """A~ {x} heard the news and smiled.
Even a~ {x} came to [celebrate|join them].
"Well done!" said a~ {x} who had seen it all.""",
    },
    "thing": {
        "EARLY": """In {his} home there was also a~ {x} that had belonged to {his} <relative>.
{He} also owned a~ {x}, but {he} hardly ever used it.
On a shelf in {his} home lay a~ [old|dusty|<color>] {x}.
A~ [old|<color>] {x} hung over {his} door.""",
        "WAY": """A~ [old|broken|<color>] {x} lay beside the path, and nobody knew whose it was.
Beside the path, someone had left a~ {x}.
In the grass there was a~ [old|<color>] {x}, but nobody noticed it.""",
        "LATE": """They kept a~ [<color>|little] {x} to remember that day.
Later, {M} gave {N} a~ [new|<color>] {x} as a present.
{N} drew a picture of {M} with a~ {x}, and they both laughed.""",
    },
    "food": {
        "EARLY": """There was always a~ [fresh|big] {x} on {his} table.
For breakfast {he} [always|often] had a~ {x}.
Nothing tasted better to {him} than a~ fresh {x}.""",
        "WAY": """{N} ate a~ {x} on the way.
A~ [big|round] {x} lay beside the path, but it was too dirty to eat.
{N} had a~ {x} for lunch, and it tasted good.""",
        "LATE": """Then they shared a~ [big|sweet|fresh] {x}.
"Here is a~ {x} for you," said {M}. "You must be hungry."
Later, they ate a~ {x} together, and [it tasted wonderful|not a crumb was left].""",
    },
    "mass food": {
        "EARLY": """{He} had {x} every morning.
Nothing tasted better to {him} than {x}.
The kitchen always smelled of {x}.""",
        "WAY": """{N} had some {x} on the way.
Somewhere, somebody was making {x}, and it smelled wonderful.""",
        "LATE": """Then they had some {x} together.
"Would you like some {x}?" asked {M}. "Yes, please!" said {N}.""",
    },
    "furniture": {
        "EARLY": """{His} home had a~ <color> {x}, and {he} was very proud of it.
Beside {his} home there was a~ [old|little|<color>] {x}.""",
        "WAY": """A~ [old|broken|<color>] {x} stood at the side of the path.
Beside the path there was a~ {x} that nobody needed any more.""",
        "LATE": """The next day, they painted {N}'s {x} <color>.
Together they made a new {x} for {M}.
"One day I will build you a~ {x}," said {M}.""",
    },
    "place": {
        "EARLY": """There was also a~ {x} nearby, but [{N} seldom went there|few people knew it].
Some days, {he} walked as far as the {x}.
{His} <relative> lived near a~ {x}.""",
        "WAY": """From the path one could see a~ {x} far away.
The path went past a~ [<calm>|small] {x}.
A sign showed the way to the {x}.""",
        "LATE": """"Next week, let us go to the {x}," said {M}.
Later, they went to the {x} together.
"I know a~ <calm> {x} not far from here," said {M}. "I will show it to you." """,
    },
    "joy": {
        "EARLY": """Nobody could {x} like {him}.
When {he} was alone, {he} liked to {x}.
{His} <relative> had taught {him} to {x}.""",
        "WAY": """{N} wanted to {x}, but there was no time for that.
By the path, a~ <animal> began to {x}.
"If only I could {x} now!" thought {N}.""",
        "LATE": """"Let us {x}!" said {M}, and so they did.
Then they began to {x}, and a~ <animal> joined them.
They were so happy that they wanted to {x} all day.""",
    },
    "trait": {
        "EARLY": """{His} <relative> was very {x} too.
"It is good to be {x}," {his} <relative> often said.""",
        "WAY": """A~ {x} <animal> came along the path and [nodded|said good morning].
By the path sat a~ {x} <animal>.""",
        "LATE": """A~ {x} <animal> came to join them.
"How {x} you are!" said {M}[ with a smile|].""",
    },
    "look": {
        "EARLY": """{He} [often|always] wore a~ {x} [hat|scarf|coat].
Over {his} door hung a~ {x} [lamp|bell|picture].""",
        "WAY": """There was a~ {x} [stone|leaf|flower|feather] on the path.
A~ {x} [cart|wagon|boat] went by.""",
        "LATE": """They hung a~ {x} [flag|ribbon|lantern] over the door.
{M} picked a~ {x} flower for {N}.""",
    },
    "land": {
        "EARLY": """It was a~ {x} [place|part of the country], and {N} loved it.
{N} came from a~ {x} [village|town], but that was long ago.""",
        "WAY": """The path went through a~ {x} [valley|wood].
By the path there was a~ {x} [house|garden].""",
        "LATE": """Then they sat down in a~ {x} [corner|spot] and rested.
"One day, let us travel to a~ {x} [island|land]," said {M}.""",
    },
    "feeling": {
        "EARLY": """Sometimes {he} was {x}, but never for long.
"Are you {x} today?" {his} <relative> [often|always] asked.""",
        "WAY": """For a moment, {N} felt a little {x}.
"Are you {x}?" asked a~ <animal> by the path. "Maybe a little," said {N}.""",
        "LATE": """"Were you {x} today?" asked {M}. {N} [nodded|laughed].
"I was {x} this morning," said {M}, "but now everything is different." """,
    },
}

# What suits a noun of nature suits it anywhere in a story.
NATURE = {
    "sun": """The sun was shining [brightly|on all the roofs].
The sun stood high in the sky.""",
    "moon": """[Far up|In the sky], a pale moon could be seen.
It was the day of the full moon.""",
    "star": """There was one bright star in the sky.
{N} thought of the star above {his} home.""",
    "sky": """There was not a cloud in the sky.
The sky was [blue|gray|clear].""",
    "cloud": """A [white|dark|small] cloud hung in the air.
A cloud that looked like a~ <animal> floated by.""",
    "wind": """The wind [blew softly|played with the leaves].
A [soft|cold|fresh] wind was blowing.""",
    "rain": """There was a smell of rain in the air.
A little rain fell, but nobody minded.""",
    "rainbow": """There was a rainbow over the {place}.
A rainbow stood in the sky.""",
    "tree": """There was [a tall|an old] tree, and birds were singing in it.
A bird sang in the [highest|oldest] tree.""",
    "flower": """A [red|blue|small|yellow] flower grew beside the door.
There was the smell of a flower in the air.""",
    "leaf": """A [yellow|red|dry] leaf fell from a tree.
A leaf danced in the wind.""",
    "grass": """The grass was [wet|high|soft and green].
Somewhere in the grass, a cricket sang.""",
    "rock": """There was a big rock where {N} liked to sit.
A lizard sat on a warm rock.""",
    "road": """The road was [long and dusty|empty and quiet].
There was nobody else on the road.""",
    "fire": """Somewhere, someone had made a fire.
The smell of a fire was in the air.""",
    "bird": """A [small|blue|little] bird was singing.
High above, a bird flew in circles.""",
    "butterfly": """A [blue|white|yellow] butterfly flew by.
A butterfly landed on {N}'s nose, and {he} laughed.""",
    "bee": """A bee flew from flower to flower.
Somewhere, a bee was humming.""",
    "snail": """A snail crossed the path, and it took a long time.
On a wet leaf sat a snail.""",
    "spider": """A spider had made a web between two branches.
In the corner, a spider was making its web.""",
    "shadow": """A shadow passed over the ground, but it was only a cloud.
{N} laughed at {his} own long shadow.""",
    "summer": """It was the most beautiful summer in years.
It felt like summer.""",
    "winter": """The winter had been long.
Everyone was glad that the winter was over.""",
    "boat": """A [little|white|red] boat lay on the shore.
Somewhere far away, a boat could be seen on the water.""",
    "train": """Far away, a train could be heard.
A train went by in the distance.""",
    "ship": """Far out at sea, there was a ship.
A picture of a ship hung on the wall of an old inn.""",
    "friend": """A friend is the best thing one can have.
"What would I be without a friend?" thought {N}.""",
    "secret": """Everyone has a secret, and so did {N}.
{N} had a secret, but that is another story.""",
    "dream": """It was like a dream.
{N} remembered a dream from the night before.""",
    "song": """Someone was singing an old song.
A song went through {N}'s head.""",
    "story": """It was like something out of a story.
{N} thought of a story that {his} <relative> had told.""",
    "treasure": """People said that there was a treasure under the {place}.
"One day I will find a treasure," thought {N}.""",
}
