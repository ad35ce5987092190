"""Which words do the small worlds consist of?"""

from __future__ import annotations


def each(words: str) -> tuple[str, ...]:
    return tuple(words.split())


GIRLS = each(
    "Anna Mia Lily Emma Zoe Nora Ella Rosa Maya Ruby Ivy Clara Alice Julia Hazel Lucy Molly Stella "
    "Iris Eva Sofia Lena Grace Daisy Amy Tara Nina Olga Vera Heidi Freya Luna Cora Dora Greta "
    "Ines Jade Kira Leila Wilma"
)
BOYS = each(
    "Ben Tom Max Leo Sam Finn Noah Oscar Jack Hugo Felix Adam Luke Eli Omar Ivan Paul Theo Owen "
    "Henry Simon Peter Kofi Ravi Nils Emil Karl Otto Jonas Marco Diego Ali Erik Toby Victor Walter "
    "Ned Gus Liam Anton"
)
PETS = each(
    "Pip Momo Coco Nibbles Patch Biscuit Bramble Pepper Fern Moss Button Tilly Benno Skip Twig "
    "Clover Acorn Dash Pebble Sunny Milo Juno Olive Ziggy Maple Rusty Poppy Bubbles Hobbs Willow "
    "Basil Tango Pogo Kiki Nutmeg Snowy Ginger Tuck Waffle Bo"
)
PEOPLE_NAMES = GIRLS + BOYS

ANIMALS = each(
    "fox dog cat rabbit bear mouse owl frog hedgehog squirrel badger deer goat sheep horse pony "
    "donkey pig duck goose hen crow robin sparrow wolf lion tiger elephant monkey turtle otter "
    "beaver mole raccoon panda koala kangaroo zebra giraffe camel penguin parrot kitten puppy lamb "
    "foal calf bunny hamster lizard dragon unicorn cow rooster swan weasel ferret moose hare "
    "ostrich"
)
WOMEN = ("queen", "princess", "witch", "fairy")
MEN = ("king", "prince", "wizard", "knight", "giant")
WORKERS = each(
    "baker farmer sailor teacher doctor painter gardener shepherd miller tailor pirate cook "
    "carpenter postman singer dancer hunter clown nurse pilot blacksmith fisher librarian "
    "musician"
)
PEOPLE = WOMEN + MEN + WORKERS

# Each can be carried, lost, wished for, made and given away.
THINGS = each(
    "kite ball lamp key map book hat scarf drum bell basket flute lantern blanket umbrella coin "
    "ring necklace mirror spoon cup bowl teapot clock watch compass candle pencil brush bag box "
    "button ribbon feather shell stone marble doll puppet robot toy whistle trumpet violin guitar "
    "crown cape mask glove shoe boot sock coat jacket sweater pillow bucket shovel "
    "hammer rope net wheel letter card picture painting poster flag balloon "
    "jar bottle plate knife fork pot pan broom comb vase nest egg telescope camera radio ticket "
    "purse wallet backpack notebook diary crayon puzzle jewel pearl medal trophy anchor paddle "
    "helmet belt bracelet kettle mug torch"
)
FOODS = each(
    "apple cake pie carrot cookie sandwich pear plum pancake muffin banana peach orange cherry "
    "potato pumpkin tomato melon waffle pretzel"
)
MASS_FOODS = each("bread honey soup cheese milk jam rice porridge butter tea juice salad")
FURNITURE = each(
    "door window table bed fence gate wall oven shelf bench cupboard stove sofa desk "
    "fireplace chimney cradle chair ladder wagon sled bicycle tent statue mailbox"
)
IN_PLACES = each(
    "forest garden meadow valley village town city castle cave barn tower library park orchard "
    "jungle swamp field bakery museum lighthouse palace workshop desert stable "
    "theater"
)
ON_PLACES = each("island hill mountain beach farm bridge cliff")
AT_PLACES = each("harbor market school mill station fair")
BY_PLACES = each("lake river sea pond well waterfall stream")
PREPOSITION = {
    **dict.fromkeys(IN_PLACES, "in"),
    **dict.fromkeys(ON_PLACES, "on"),
    **dict.fromkeys(AT_PLACES, "at"),
    **dict.fromkeys(BY_PLACES, "by"),
}
PLACES = tuple(PREPOSITION)
BUILT = frozenset(
    each(
        "tower library bakery museum lighthouse palace workshop stable theater castle barn school "
        "mill station market fair harbor bridge well town city village farm park"
    )
)

TRAITS = each(
    "brave kind shy clever curious gentle honest proud patient cheerful friendly stubborn careful "
    "playful quiet loyal polite grumpy helpful silly dreamy lively bold generous thoughtful "
    "clumsy wise bright calm busy"
)
BREAKABLE = each(
    "lamp cup bowl teapot clock watch mirror flute violin guitar plate jar bottle vase toy doll "
    "lantern radio telescope camera mug kite drum robot necklace comb"
)
LOOKS = each(
    "red blue green yellow purple pink orange white black brown silver golden gray shiny old new "
    "tiny big small round pretty beautiful strange lovely dusty fancy plain simple little special "
    "bright colorful magic odd rare useful splendid wonderful"
)
COLORS = ("red", "blue", "green", "yellow", "purple", "pink", "orange", "white", "black", "brown")
WILD_LOOKS = ("dark", "quiet", "misty", "sunny", "windy", "lonely", "peaceful", "wild", "cold")
BUILT_LOOKS = ("quiet", "lonely", "busy", "noisy", "pleasant", "ancient", "famous", "peaceful")
LANDS = tuple(dict.fromkeys((*WILD_LOOKS, *BUILT_LOOKS, "foggy", "distant", "hidden", "secret")))
SAD = ("sad", "worried", "unhappy", "upset", "miserable", "gloomy", "troubled")
HAPPY = ("happy", "happy", "glad", "joyful", "delighted", "pleased")
FEELINGS = (
    *("happy", "sad", "tired", "hungry", "thirsty", "afraid", "angry", "lonely", "nervous"),
    *("excited", "sleepy", "worried", "bored", "scared", "calm", "surprised", "glad", "jealous"),
)

# What one does for joy, without an object.
SKILLS = ("dance", "sing", "swim", "climb", "whistle", "juggle", "paint", "draw", "cook", "read")
JOYS = each(
    "dance sing swim climb jump run laugh play dream hop skip dig paint draw cook read write "
    "skate explore whistle wander juggle hum"
)

CITIES = each(
    "Oslo Paris Rome Lima Cairo Delhi Tokyo Berlin Madrid Vienna Lisbon Athens Dublin Prague "
    "Warsaw Boston Denver Quito Nairobi Sydney Helsinki Geneva Milan Seoul Hanoi Bergen Porto "
    "Lagos Riga Turin"
)
JOBS = (*WORKERS, "lawyer", "writer", "driver", "engineer", "plumber", "judge", "waiter")
HOUSE_PETS = each("cat dog parrot hamster rabbit turtle goldfish pony canary lizard")
HOBBIES = each(
    "chess fishing painting running swimming cooking reading skiing dancing sailing gardening "
    "singing knitting hiking cycling tennis football drawing"
)
ROOMS = each("kitchen cellar attic hall bedroom bathroom office garage pantry nursery")
LIKED = each(
    "apples pears cherries plums cookies pancakes carrots grapes melons peaches bananas noodles "
    "soup cheese honey bread chocolate tea coffee milk books songs stars trains boats horses "
    "flowers puzzles kites maps stories rain snow music"
)

SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
PLAIN = tuple(
    dict.fromkeys(
        ANIMALS + THINGS + FOODS + MASS_FOODS + FURNITURE + PLACES + WORKERS + TRAITS + COLORS
    )
)
