"""A story's world: who is in it, who holds what, what lies where, and the sentences told so far.

A plot is a list of beats; a beat changes the world and tells what happened with words that are read from the world. So
what a story says agrees with what came before: a thing is found in the spot it was put in because the sentence asks the
world where it lies. This file knows state and how a sentence is chosen and filled; it knows no plot.

    world = World(Dice(seed, index), "lost", hero=CHILDREN[0], noun="ball", place=PLACES[0])
    world.hold("thing", "hero")
    world.put("thing", "hero", world.a_spot())
    world.say("{hero} put the {thing} {thing_spot}.", "{He} [left|laid] the {thing} {thing_spot}.")
    world.text()

A template is filled from the world's fields. A field that is not set there is drawn from the grammar's lists:
`{bird}` is a bird, `{a_bird}` one with its article, `{bird1}` one that stays the same for the rest of the story.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import count
from struct import unpack
from typing import NamedTuple, TypeVar

from fuselm.data.story.places import INDOOR_SKIES, OUTDOOR_SKIES, SKY_ADJECTIVES, Place, out_of
from fuselm.data.story.things import BIG, FOOD, ILLNESSES, LOOKS, NUMBERS, SIZES, THINGS, USES, Thing
from fuselm.data.story.words import (
    ANIMAL_ELDERS,
    ANIMALS,
    BOYS,
    CHILD_ELDERS,
    GIRLS,
    GRAMMAR,
    HE_CREATURES,
    SHE_CREATURES,
    SMALL_ANIMALS,
    TOY_ELDERS,
    TOYS,
    words,
)

T = TypeVar("T")

# What a reader could have foretold is told between these two marks; stories.py takes them out and notes the offsets.
MARK_START, MARK_END = "\x01", "\x02"
LONG = 48  # of a long list, as those of names, one in so many is taken even in a small world
MANY_TRIES = 100  # of drawing something that fits: far more than a world of full variety ever needs


class Dice:
    """Random choices from numbers of our own making: the same on every machine and Python version.

    BLAKE2b in counter mode: one hash gives sixteen numbers, at 0.3 us each; a step of SplitMix64 in Python took 0.7.
    With `variety` only so many options of any choice are ever taken, spread over all of them: a smaller world, and the
    same grammar.
    """

    __slots__ = ("roll", "variety")

    def __init__(self, *parts: int, variety: int | None = None) -> None:
        self.variety = variety or 1 << 32
        key = b"".join((part % (1 << 64)).to_bytes(8, "little") for part in parts)
        self.roll = _numbers(key).__next__  # the next 32-bit number

    def below(self, bound: int) -> int:
        return self.roll() * bound >> 32

    def pick(self, options: Sequence[T]) -> T:
        size = len(options)
        used = min(size, max(self.variety, size // LONG))
        return options[(self.roll() * used >> 32) * size // used]

    def pick_nested(self, options: Sequence[Sequence[T]]) -> T:
        """First one of the options, then one of its variants: an option with many is not told more often."""
        variants = self.pick(options)
        return self.pick(variants) if len(variants) > 1 else variants[0]


def _numbers(key: bytes) -> Iterator[int]:
    for block in count():
        yield from unpack("<16I", blake2b(block.to_bytes(8, "little"), key=key).digest())


# --- words -----------------------------------------------------------------------------------------------------------


def with_article(phrase: str) -> str:
    """'an owl', 'a unicorn': by sound, as far as the words of this corpus need."""
    if phrase.startswith(("uni", "one", "use", "uku", "eu")):
        return f"a {phrase}"
    return f"an {phrase}" if phrase[0] in "aeiouAEIOU" or phrase.startswith(("hour", "honest")) else f"a {phrase}"


def expand(template: str) -> tuple[str, ...]:
    """Every sentence that a template with [this|or that] in it can be."""
    head, bracket, rest = template.partition("[")
    if not bracket:
        return (template,)
    inner, _, tail = rest.partition("]")
    ends = expand(tail)
    return tuple(head + choice + end for choice in inner.split("|") for end in ends)


@cache  # keyed by the literal options of a call: as many entries as there are calls in the plots
def _variants(options: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(expand(option) for option in options)


@cache
def _list(name: str) -> tuple[tuple[str, ...], ...]:
    return _variants(_LISTS[name])


_LISTS = {**GRAMMAR, **FOOD, "illness": ILLNESSES}
# Lists that depend on what sort of being the hero is.
BY_SORT = {
    "home": {"child": "home_child", "animal": "home_animal", "toy": "home_toy"},
    "task": {"child": "chore", "animal": "chore", "toy": "toy_chore"},
}


class Fields(dict[str, str]):
    """What the braces of a template stand for; what is not set is drawn from the lists."""

    def __init__(self, dice: Dice, sort: str) -> None:
        super().__init__()
        self.dice = dice
        self.sort = sort  # of the hero: child, animal or toy

    def __missing__(self, key: str) -> str:
        if key.startswith("a_"):
            return with_article(self[key[2:]])
        if key.startswith("A_"):
            return with_article(self[key[2:]]).capitalize()
        name = key.rstrip("123456789")
        text = self.dice.pick_nested(_list(BY_SORT[name][self.sort] if name in BY_SORT else name))
        if "{" in text:
            text = text.format_map(self)
        if name != key:
            self[key] = text
        return text


# --- who -------------------------------------------------------------------------------------------------------------


class Being(NamedTuple):
    """Somebody with a name; the kind (fox, rag doll) of creatures and toys is drawn for each story."""

    name: str
    pronoun: str
    sort: str  # child, animal or toy
    kind: str = ""


CHILDREN = tuple(Being(n, "she", "child", "girl") for n in GIRLS) + tuple(Being(n, "he", "child", "boy") for n in BOYS)
CREATURES = tuple(Being(n, "she", "animal") for n in SHE_CREATURES) + tuple(
    Being(n, "he", "animal") for n in HE_CREATURES
)
PLAYTHINGS = tuple(being._replace(sort="toy") for being in CREATURES)

KINDS = {"animal": ANIMALS, "toy": TOYS}
ELDERS = {"child": CHILD_ELDERS, "animal": ANIMAL_ELDERS, "toy": TOY_ELDERS}
PRONOUNS = {"she": ("she", "her", "her", "herself"), "he": ("he", "him", "his", "himself")}
SUFFIXES = {"hero": "", "friend": "2", "other": "3", "elder": "4"}
# What friends a hero of each sort has, by tenths.
COMPANY = {
    "child": (CHILDREN,) * 7 + (CREATURES,) * 3,
    "animal": (CREATURES,) * 8 + (CHILDREN,) * 2,
    "toy": (PLAYTHINGS,) * 7 + (CREATURES,) * 2 + (CHILDREN,),
}

# What can have any color: not brass or gold, and not what is a shape rather than a material.
COLORABLE = words("""
wooden tin paper cloth felt rubber leather silk woolen plastic metal glass clay velvet cotton cardboard knitted straw
satin linen canvas enamel lace woolly porcelain quilted painted corduroy
""")
PLAIN_COLORS = GRAMMAR["color"][:11]
THING_OF = {thing.noun: thing for thing in THINGS}
TIMES = ("morning", "noon", "afternoon", "evening")
LATER = (
    ("Later that morning", "After a while", "Before long"),
    ("At noon", "Around noon", "When the noon bell rang", "At midday"),
    ("In the afternoon", "Later that afternoon", "Some time after lunch", "As the afternoon wore on"),
    ("Toward evening", "Late in the day", "Just before dark", "When the day was almost over"),
)


@cache
def _pronoun_fields(pronoun: str, suffix: str) -> dict[str, str]:
    subject, object_, possessive, reflexive = PRONOUNS[pronoun]
    pronouns = {"he": subject, "him": object_, "his": possessive, "himself": reflexive}
    pronouns |= {"He": subject.capitalize(), "His": possessive.capitalize()}
    return {key + suffix: value for key, value in pronouns.items()}


class World:
    """The state of one story. Items are "thing" and whatever else a plot names; roles are those of SUFFIXES."""

    def __init__(self, dice: Dice, plot: str, hero: Being, noun: str, place: Place) -> None:
        self.dice, self.plot, self.place, self.noun = dice, plot, place, noun
        self.fields = Fields(dice, hero.sort)
        self.holder: dict[str, str] = {}  # item -> role
        self.lies: dict[str, str] = {}  # item -> spot
        self.cast: dict[str, Being] = {}
        self.counts: dict[str, int] = {}  # of the countable: at the start, found, and by role
        self.ending = ""
        self.paragraphs: list[str] = []
        self.sentences: list[str] = []
        self.num_words = 0
        self.told: set[str] = set()  # remarks made, so that none is made twice
        self.free_spots = list(place.spots)
        self._enter("hero", self._with_kind(hero))
        self.bring("friend")
        self._choose_elder()
        self._set_scene()

    # --- setting up --------------------------------------------------------------------------------------------------

    def _with_kind(self, being: Being) -> Being:
        if being.kind:
            return being
        is_small = self.plot == "small" and not self.cast and being.sort == "animal"  # the hero, who comes first
        return being._replace(kind=self.dice.pick(SMALL_ANIMALS if is_small else KINDS[being.sort]))

    def bring(self, role: str) -> None:
        """Somebody new comes in, whose name begins with another letter: two names are never mixed up."""
        taken = [being.name[0] for being in self.cast.values()]
        company = COMPANY[self.cast["hero"].sort]
        fitting = (being for beings in company for being in beings if being.name[0] not in taken)
        for _ in range(MANY_TRIES):
            being = self.dice.pick_nested(company)
            if being.name[0] not in taken:
                break
        else:  # in a world of a few names
            being = next(fitting)
        self._enter(role, self._with_kind(being))

    def _enter(self, role: str, being: Being) -> None:
        self.cast[role] = being
        fields, suffix = self.fields, SUFFIXES[role]
        fields[role], fields[f"kid{suffix}"] = being.name, being.kind
        fields[f"{role}_the"] = being.name if being.sort == "child" else f"{being.name} the {being.kind}"
        fields.update(_pronoun_fields(being.pronoun, suffix))

    def _choose_elder(self) -> None:
        sort = self.cast["hero"].sort
        pronoun = self.dice.pick(("she", "he"))
        self._enter("elder", Being(self.dice.pick(ELDERS[sort][pronoun]), pronoun, "child", "elder"))

    def _set_scene(self) -> None:
        """The weather, which stays all day, and the time, which only goes forward."""
        fields = self.fields
        self.sky = self.dice.pick(OUTDOOR_SKIES if self.place.outdoors else INDOOR_SKIES)
        self.clock = self.dice.pick((0, 0, 2))
        fields["sky"] = self.dice.pick(SKY_ADJECTIVES[self.sky])
        fields["time"] = TIMES[self.clock]
        fields["place"], fields["in_place"], fields["to_place"] = self.place.name, self.place.where, self.place.whither
        if self.noun in THING_OF:
            self.describe("", THING_OF[self.noun])

    def describe(self, suffix: str, thing: Thing) -> None:
        """Give a thing its looks, once: {thing} ball, {fine} small red ball, {athing} a small red ball."""
        look = self.dice.below(6)
        material = self.dice.pick(thing.materials)
        color, quality = self.dice.pick(GRAMMAR["color"]), self.dice.pick(LOOKS)
        adjectives = (
            color,
            quality,
            material,
            f"{self.dice.pick(SIZES)} {color}",
            f"{quality} {material}" if quality not in material else material,
            f"{color} {material}" if material in COLORABLE and color in PLAIN_COLORS else quality,
        )[look]
        fine = f"{adjectives} {thing.noun}"
        use = USES[thing.group]
        named = {"thing": thing.noun, "fine": fine, "athing": with_article(fine), "use": use.base, "used": use.past}
        named |= {"using": use.doing, "shared": use.together}
        for key, value in named.items():
            self.fields[key + suffix] = value

    def another_thing(self, suffix: str) -> Thing:
        """A second thing, small, and of another noun than the first and than whatever already has looks."""
        known = {value for key, value in self.fields.items() if key.startswith("thing")}
        for _ in range(MANY_TRIES):
            thing = self.dice.pick(THINGS)
            if thing.noun not in known and thing.noun not in BIG:
                break
        else:  # in a world of a few things
            thing = next(thing for thing in THINGS if thing.noun not in known and thing.noun not in BIG)
        self.describe(suffix, thing)
        return thing

    def a_spot(self, *prepositions: str) -> str:
        """A spot that no item has had yet and that is not named after a thing; with `prepositions`, one of those."""
        nouns = [self.fields.get(key, self.noun) for key in ("thing", "thing2", "thing3")]
        spots = [spot for spot in self.free_spots if not any(noun in spot for noun in nouns)]
        if prepositions:
            spots = [spot for spot in spots if spot.partition(" ")[0] in prepositions]
        spot = self.dice.pick(spots)
        self.free_spots.remove(spot)
        return spot

    def start_in_the_morning(self) -> None:
        self.clock, self.fields["time"] = 0, TIMES[0]

    # --- changing the world ------------------------------------------------------------------------------------------

    def hold(self, item: str, role: str) -> None:
        assert item not in self.holder | self.lies, f"{item} is already somewhere"
        self.holder[item] = role

    def give(self, item: str, giver: str, taker: str) -> None:
        assert self.holder[item] == giver, f"{giver} gives {item}, which {self.holder[item]} has"
        self.holder[item] = taker

    def put(self, item: str, role: str, spot: str) -> None:
        """Somebody lays an item down; {thing_spot} says where."""
        holder = self.holder.pop(item)
        assert holder == role, f"{role} puts away {item}, which {holder} has"
        self.lies[item] = self.fields[f"{item}_spot"] = spot

    def find(self, item: str, role: str) -> None:
        """Somebody takes an item from where it lies; {thing_found} says where that was, {thing_out} whence it comes."""
        spot = self.lies.pop(item)
        self.holder[item] = role
        self.recall(f"{item}_found", spot)
        self.fields[f"{item}_out"] = out_of(spot)

    def hand_out(self, taker: str, number: int) -> None:
        """The hero gives away some of what is counted."""
        assert self.counts["hero"] >= number, f"{number} of {self.counts['hero']} are given"
        self.counts["hero"] -= number
        self.counts[taker] = self.counts.get(taker, 0) + number

    def recall(self, field: str, text: str) -> None:
        """Set a field whose value follows from what was told before; the place where it is told is noted."""
        self.fields[field] = f"{MARK_START}{text}{MARK_END}"

    def advance(self) -> None:
        """Let time pass, never backward; {later} says how much, {later_on} within a sentence."""
        self.clock = min(self.clock + 1, 3)
        later = self.dice.pick(LATER[self.clock])
        self.fields["later"], self.fields["later_on"] = later, later[0].lower() + later[1:]

    # --- telling -----------------------------------------------------------------------------------------------------

    def say(self, *options: str) -> None:
        """Tell one of the options: a sentence, or a few."""
        text = self.dice.pick_nested(_variants(options)).format_map(self.fields)
        if "a" <= text[0] <= "z":
            text = text[0].upper() + text[1:]
        self.sentences.append(text)
        self.num_words += text.count(" ") + 1

    def maybe(self, percent: int, *options: str) -> None:
        if self.chance(percent):
            self.say(*options)

    def chance(self, percent: int) -> bool:
        return self.dice.below(100) < percent

    def paragraph(self) -> None:
        """End the paragraph, if one has begun."""
        if self.sentences:
            self.paragraphs.append(" ".join(self.sentences))
            self.sentences = []

    def text(self) -> str:
        self.paragraph()
        return "\n".join(self.paragraphs)


def number(count: int) -> str:
    """3 -> 'three'."""
    return NUMBERS[count]
