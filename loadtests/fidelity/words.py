"""Keys and values that needles carry: word pairs, numbers, UUIDs and coded words, all drawn from a seeded generator."""

import random
import string
import uuid
from collections.abc import Callable

ADJECTIVES = """
    able amber ancient arctic awake azure bare bitter blank bold brave brief bright brisk broad bronze calm
    careful cheerful civil classic clean clever cloudy coastal cold copper coral cosmic crimson curious daily damp
    daring deep distant dusty eager early eastern easy elegant empty even faint fair famous fancy fast fearless
    final fine firm flat fluffy foggy formal fresh frosty gentle giant glad golden grand grateful green grey handy
    happy hasty heavy hidden hollow honest humble icy idle inner ivory jolly keen kind large late lazy light
    little lively lonely long loud loyal lucky lunar mellow merry mild misty modern modest narrow neat nimble
    noble noisy northern odd olive open orange outer pale patient plain playful polite proud purple quick quiet
    rapid rare ready restless rich ripe robust round royal rural rustic sandy scarlet secret serene shady sharp
    shiny short shy silent silver simple sleepy slim slow small smooth snowy soft solar solid southern spare
    stable steady steep stern still strange strong sturdy sunny sweet swift tall tame tender thick thin tidy tiny
    tough urban vast velvet vivid warm wary western wide wild windy wise witty wooden young zealous
""".split()  # noqa: SIM905 (a list of 200 quoted words reads worse)
NOUNS = """
    acorn anchor apple apron arrow attic badge bakery balcony banjo barn basin basket beach beacon bell bench
    berry bicycle blanket boat bottle boulder bridge brook broom bucket button cabin cactus camera candle canoe
    canyon carpet castle cavern cellar chair chalk cherry chimney circle cliff clock cloud clover coast comet
    compass cottage cradle crater creek crystal curtain desert diary dragon drawer drum eagle engine falcon farm
    feather fence ferry field flag flute forest fossil fountain fox galaxy garden gate geyser glacier glove goose
    grove guitar hammer harbor hat hawk hedge helmet heron hill horizon house island jacket jar jungle kettle key
    kite ladder lagoon lake lamp lantern leaf lemon library lighthouse lily lizard log magnet maple market marsh
    meadow melon mill mirror mitten moon moss mountain museum needle nest oasis oak ocean orchard otter owl paddle
    palace panther paper parrot path pebble pencil pepper piano pillow pine planet plate pocket pond porch prairie
    puzzle quarry quilt rabbit raft rainbow ranch raven reef ribbon ridge ring river road robin rocket roof rope
    saddle sail salmon scarf school shadow shell ship shovel sparrow spoon spring spruce square stable star stone
    storm stove stream street summit swan table tent thistle thunder tiger timber torch tower trail train tree
    trumpet tulip tunnel turtle valley vase village violin wagon walnut water wave whale wheel willow window
    winter wolf yard
""".split()  # noqa: SIM905 (a list of 200 quoted words reads worse)


def word_key(rng: random.Random) -> str:
    """One of about 50,000 adjective-noun pairs, e.g. ``tidy-harbor``."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: random.Random) -> str:
    """A number of seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def random_uuid(rng: random.Random) -> str:
    """A version-4 UUID in canonical form."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def coded_word(rng: random.Random, length: int = 6) -> str:
    """A meaningless word of lower-case letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def variable_name(rng: random.Random) -> str:
    """A variable name of five capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=5))


def distinct(rng: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    """`count` different results of `make(rng)`, in the order in which they were drawn."""
    seen: dict[str, None] = {}
    while len(seen) < count:
        seen[make(rng)] = None
    return list(seen)
