"""The built-in corpus: an endless, seeded source of short stories, for models small enough to watch them learn.

A story is a pure function of (seed, index, split): the same text on every machine and every Python. It comes from a
small simulation (world.py) that a plot walks through (finding.py, kindness.py, dealing.py,
duty.py, growing.py), so names stay, things are found where they were put, numbers add up and endings
follow from beginnings. This file plans a story, keeps the splits apart, and says what is true in it. It knows no
files, tokens or models.

    text = story(seed=0, index=7)
    for text in stories(seed=0, split="valid"): ...         # endless
    facts(seed=0, index=7).spot                             # "in the glass case"

Train and valid never meet. A story's key is its plot, hero, object and place; a hash of the key puts 1 key in 32 into
valid and the others into train, whatever the seed. A story names its hero, object and place and is of one plot, so no
text of one split can appear in the other, and valid asks for combinations that training has never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

from fuselm.data.story import dealing, duty, finding, growing, kindness
from fuselm.data.story.places import INDOOR_PLACES, OUTDOOR_PLACES, PLACES, Place
from fuselm.data.story.things import BIG, BREAKABLES, BUILDS, COUNTABLES, PLANTS, SHOPPING, THINGS
from fuselm.data.story.words import phrases
from fuselm.data.story.world import CHILDREN, CREATURES, MARK_END, MARK_START, PLAYTHINGS, Being, Dice, World

SPLITS = ("train", "valid")
HELD_OUT = 32  # one key in so many is for valid
MANY_KEYS = 10_000  # to draw before giving up: valid needs 32 on average


class Plot(NamedTuple):
    """What happens, and to whom, with what and where it can."""

    name: str
    tell: Callable[[World], None]
    objects: tuple[str, ...]
    heroes: tuple[Being, ...]
    places: tuple[Place, ...] = PLACES


@dataclass(frozen=True)
class Facts:
    """What is true in a story, for checking texts and models.

    `spot` is where the object (or its pieces, or its pot) was put and found again, None if the plot has no such turn.
    `counts` is what was counted: "start" and "found" went in, "friend" and "other" got some, "hero" has the rest.
    `probes` are (offset, answer): from that offset on the text reads `answer`, and what came before decides it.
    """

    plot: str
    hero: str
    pronoun: str
    object: str
    place: str
    friend: str
    elder: str
    spot: str | None
    ending: str
    counts: dict[str, int]
    probes: tuple[tuple[int, str], ...]


# --- planning --------------------------------------------------------------------------------------------------------

_ANY = tuple(thing.noun for thing in THINGS)
_SMALL = tuple(noun for noun in _ANY if noun not in BIG)
_TOOLS = ("rope", "net", "blanket", "umbrella", "shovel", "broom", "fishing rod", "walking stick")
_EATERS = CHILDREN + CREATURES
_ALL = CHILDREN + CREATURES + PLAYTHINGS


def _places(names: str) -> tuple[Place, ...]:
    wanted = phrases(names)
    return tuple(place for place in PLACES if place.name in wanted)


_UNTIDY = INDOOR_PLACES + _places("garden, backyard, camp, playground, schoolyard, farm, harbor")
_LIGHT = OUTDOOR_PLACES + _places("greenhouse, classroom, kitchen")
_ROOMY = OUTDOOR_PLACES + _places("workshop, garage, barn")
_SHOPS = _places("market, village, town square, fair, harbor")
_PRIVATE = _places("kitchen, attic, nursery, cellar, living room, hallway, laundry room")
_PUBLIC = tuple(place for place in PLACES if place not in _PRIVATE)

PLOTS = (
    Plot("lost", finding.lost, _SMALL, _ALL),
    Plot("surprise", finding.surprise, _SMALL, _ALL),
    Plot("hunt", finding.hunt, _SMALL, _ALL),
    Plot("tidy", finding.tidy, _SMALL, _ALL, _UNTIDY),
    Plot("riddle", finding.riddle, _SMALL, _ALL),
    Plot("share", kindness.share, _SMALL, _EATERS, OUTDOOR_PLACES),
    Plot("sick", kindness.sick, _SMALL, _EATERS),
    Plot("newcomer", kindness.newcomer, _SMALL, _ALL, _PUBLIC),
    Plot("rescue", kindness.rescue, _TOOLS, _EATERS),
    Plot("small", kindness.small, _SMALL, _ALL),
    Plot("count", dealing.count, tuple(many for _, many in COUNTABLES), _EATERS),
    Plot("trade", dealing.trade, _ANY, _ALL),
    Plot("lend", dealing.lend, _SMALL, _ALL),
    Plot("promise", duty.promise, _SMALL, _ALL),
    Plot("quarrel", dealing.quarrel, _SMALL, _ALL),
    Plot("errand", duty.errand, SHOPPING, _EATERS, _SHOPS),
    Plot("message", duty.message, _SMALL, _ALL),
    Plot("fear", growing.fear, _SMALL, _EATERS),
    Plot("race", growing.race, _ANY, _ALL, OUTDOOR_PLACES),
    Plot("honest", duty.honest, BREAKABLES, _ALL, INDOOR_PLACES),
    Plot("build", growing.build, tuple(plan.noun for plan in BUILDS), _ALL, _ROOMY),
    Plot("plant", growing.plant, PLANTS, _EATERS, _LIGHT),
    Plot("false alarm", duty.false_alarm, _SMALL, _EATERS, OUTDOOR_PLACES),
)


def is_held_out(plot: str, hero: str, noun: str, place: str) -> bool:
    """Whether stories with this key are for valid alone."""
    # Of the words, not of their numbers: a word more in a list moves no key to the other side.
    weight = _weigh("plot", plot) + _weigh("hero", hero) + _weigh("object", noun) + _weigh("place", place)
    # Folded and multiplied, so that it does not matter much that the four are merely added.
    return ((weight ^ (weight >> 29)) * 0xD1342543DE82EF95 >> 32) % HELD_OUT == 0


@cache  # valid draws some 32 keys for each story: hashing whole keys would take as long as telling the story
def _weigh(part: str, word: str) -> int:
    return int.from_bytes(blake2b(f"{part}: {word}".encode(), digest_size=8).digest(), "little")


def _imagine(seed: int, index: int, split: str, variety: int | None = None) -> World:
    """Draw keys until one belongs to the split, then live through the story."""
    if split not in SPLITS:
        raise ValueError(f"a split is one of {', '.join(SPLITS)}, not {split!r}")
    if index < 0:
        raise ValueError(f"stories are numbered from 0, and {index} is before the first")
    dice = Dice(seed, SPLITS.index(split), index, variety=variety)
    for _ in range(MANY_KEYS):
        plot = dice.pick(PLOTS)
        hero, noun, place = dice.pick(plot.heroes), dice.pick(plot.objects), dice.pick(plot.places)
        if is_held_out(plot.name, hero.name, noun, place.name) == (split == "valid"):
            break
    else:
        raise ValueError(f"A world of variety {variety} is too small: none of its keys is for {split}. Take more.")
    world = World(dice, plot.name, hero, noun, place)
    plot.tell(world)
    return world


# --- what others call ------------------------------------------------------------------------------------------------


def story(seed: int, index: int, split: str = "train", *, variety: int | None = None) -> str:
    """One story: paragraphs of plain ASCII, separated by newlines. With `variety`, from a small world: see Dice."""
    return _imagine(seed, index, split, variety).text().replace(MARK_START, "").replace(MARK_END, "")


def stories(seed: int = 0, *, split: str = "train", start: int = 0, variety: int | None = None) -> Iterator[str]:
    """All stories of a split from number `start` on; there is no last one."""
    return (story(seed, index, split, variety=variety) for index in count(start))


def facts(seed: int, index: int, split: str = "train") -> Facts:
    """What is true in `story(seed, index, split)`."""
    world = _imagine(seed, index, split)
    fields = world.fields
    spots = (fields.get(f"{item}_spot") for item in ("thing", "pieces", "pot", "part1"))
    return Facts(
        plot=world.plot,
        hero=world.cast["hero"].name,
        pronoun=world.cast["hero"].pronoun,
        object=world.noun,
        place=world.place.name,
        friend=world.cast["friend"].name,
        elder=world.cast["elder"].name,
        spot=next((spot for spot in spots if spot), None),
        ending=world.ending,
        counts=dict(world.counts),
        probes=_probes(world.text()),
    )


def problems(text: str, facts: Facts) -> list[str]:
    """What a text that tells this story, whoever wrote it, gets wrong; an empty list is a consistent story."""
    third = len(text) // 3
    parts = {"beginning": text[:third], "end": text[-third:]}
    wrong = [f"{facts.hero} is not named in the {name}" for name, part in parts.items() if facts.hero not in part]
    wrong += [f"there is no {word} in it" for word in (facts.object, facts.place) if word not in text]
    if facts.spot and text.lower().count(facts.spot.lower()) < 2:
        wrong.append(f"what was put {facts.spot} is not found there")
    return wrong


def _probes(marked: str) -> tuple[tuple[int, str], ...]:
    """Offsets in the text without marks; of an answer that is told twice only the first is a question."""
    found: dict[str, int] = {}
    offset = 0
    for k, piece in enumerate(marked.replace(MARK_END, MARK_START).split(MARK_START)):
        if k % 2:
            found.setdefault(piece, offset)
        offset += len(piece)
    return tuple((where, answer) for answer, where in found.items())
