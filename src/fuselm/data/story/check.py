"""Whether a text is a story that the built-in grammar could have told: for grading models that were trained on it.

On first use some thousand stories are told to a listener, who notes every template on offer, what its fields held, and
which plot tells what in which order (1 to 2 s, once in a process). A text is then taken apart into templates again:
each stretch of it must be a template with words of the grammar's own lists in its fields, and within a template he must
stay he and a ball a ball. Of all readings of the whole text the one with the fewest contradictions counts; what is
wrong even in that one is a problem. It knows no seeds, splits or models, nor which story a text should be.

    verdict = check(text, finished=model_stopped_by_itself)     # verdict.good, verdict.problems
    tally(check(text) for text in texts)                        # {"stories": 20, "grammatical": 19, ...}
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

from fuselm.data.stories import PLOTS
from fuselm.data.story import duty, finding, growing, places, things, words, world
from fuselm.data.story.places import PLACES
from fuselm.data.story.things import BUILDS, COUNTABLES, NUMBERS, THINGS
from fuselm.data.story.world import CHILDREN, CREATURES, MARK_END, MARK_START, SUFFIXES, expand, with_article

Slot = tuple[str, ...]  # a field, " {a_bug}s", in its parts: space, article, key, suffix
Meaning = Mapping[str, str]  # what a stretch of text says of the story: variable -> value

LISTENED = 5000  # stories, so that each plot is heard some 220 times
SEED = 2  # of the stories listened to, which are none of stories.py's: those are dealt by plot, with other dice
WANDERS = 8  # a beat of so many plots is a passing remark: it may come anywhere
BEAM = 24  # readings followed side by side
HERO = frozenset(("hero", "pronoun", "kid", "is a child"))  # what a hero keeps


@dataclass(frozen=True)
class Verdict:
    """What was found; `consistent` is about all but the hero: friends, things, spots, sums, the order of telling."""

    grammatical: bool
    keeps_hero: bool
    ends: bool
    problems: tuple[str, ...]
    consistent: bool = True

    @property
    def good(self) -> bool:
        return self.grammatical and self.keeps_hero and self.ends


def check(text: str, *, finished: bool = True) -> Verdict:
    """Judge one text; `finished` is False when its writer was stopped before the end."""
    if not text.strip():
        return Verdict(False, False, False, ("there is no text",), False)
    grammar = _grammar()
    path = grammar.readings(text.strip())[0]
    problems = list(path.problems) + [("world", problem) for problem in grammar.audit(path)]
    if "hero" not in path.known:
        problems.append(("hero", "nobody is introduced as the hero"))
    if not finished:
        problems.append(("end", "it was cut off before its end"))
    elif path.lost or not grammar.last & {(plot, path.told[-1]) for plot in path.plots}:
        problems.append(("end", "it does not stop with an ending"))
    kinds, texts = {kind for kind, _ in problems}, tuple(text for _, text in problems)
    return Verdict("grammar" not in kinds, "hero" not in kinds, "end" not in kinds, texts, "world" not in kinds)


def tally(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many stories there are, and how many of them are as they should be."""
    found = list(verdicts)
    names = {"keeps_hero": "keep_hero", "ends": "end"}
    flags = ("grammatical", "keeps_hero", "ends", "good", "consistent")
    return {"stories": len(found)} | {names.get(flag, flag): sum(getattr(v, flag) for v in found) for flag in flags}


# --- listening to the grammar ----------------------------------------------------------------------------------------


class _OpenDice(world.Dice):
    """Dice that remember what there was to pick from: a beat may pick its sentence before it says it."""

    offered: Sequence[object] = ()

    def pick(self, options: Sequence[Any]) -> Any:
        self.offered = options
        return super().pick(options)


class _Listener(world.World):
    """A world whose story is told at once, and that notes all the options of every beat."""

    def __init__(self, number: int) -> None:
        plot, self.open_dice = PLOTS[number % len(PLOTS)], _OpenDice(SEED, number)
        self.beats: list[tuple[str, ...]] = []
        pick = self.open_dice.pick
        super().__init__(self.open_dice, plot.name, pick(plot.heroes), pick(plot.objects), pick(plot.places))
        plot.tell(self)

    def say(self, *options: str) -> None:
        offered = self.open_dice.offered
        if len(options) == 1 and options[0] in offered:
            beat = tuple(str(option).replace(self.fields.get("many", "{many}"), "{many}") for option in offered)
        else:
            beat = tuple(option.replace("{athing", "{a_fine").replace("{put", "the {put") for option in options)
        self.beats.append(beat)
        super().say(*options)


# --- what words there are, and what they say of the story ------------------------------------------------------------

_PLURALS = dict(COUNTABLES)
_SPOTS = frozenset(spot for place in PLACES for spot in place.spots)


def _looks() -> Iterator[tuple[str, str]]:
    """Every thing with its looks, as World.describe gives them, and its noun."""
    breakables = [(noun, duty.BREAKABLE_LOOKS) for noun in things.BREAKABLES]
    for noun, materials in [(thing.noun, thing.materials) for thing in THINGS] + breakables:
        looks = ["{color}", "{look}", "{size} {color}", *materials, *("{look} " + material for material in materials)]
        looks += ["{plain} " + material for material in materials if material in world.COLORABLE]
        yield from ((f"{look} {noun}", noun) for look in looks)


@cache
def _lists() -> dict[str, tuple[str, ...]]:
    """What a field is drawn from that no plot sets, by the field's name."""
    lists = {**words.GRAMMAR, **things.FOOD, "illness": things.ILLNESSES}
    lists |= {"look": things.LOOKS, "size": things.SIZES, "plain": world.PLAIN_COLORS}
    lists |= {name: tuple(chain(*(lists[one] for one in sorts.values()))) for name, sorts in world.BY_SORT.items()}
    return {name: tuple(chain(*map(expand, options))) for name, options in lists.items()}


@cache
def _tables() -> list[frozenset[str]]:
    """Lists from which plots set fields, short ones first."""
    kinds = {*chain(*world.KINDS.values()), *words.SMALL_ANIMALS}
    children, nouns = {being.name for being in CHILDREN}, {thing.noun for thing in THINGS}
    tables: list[Iterable[str]] = [
        children | {being.name for being in CREATURES},
        children | {f"{being.name} the {kind}" for being in CREATURES for kind in kinds},
        kinds | {being.kind for being in CHILDREN},
        *(_SPOTS, map(places.out_of, _SPOTS), (spot[0].upper() + spot[1:] for spot in _SPOTS)),
        *(nouns, nouns | {*things.BREAKABLES, *things.PLANTS, *(plan.noun for plan in BUILDS)}),
        *(NUMBERS, _PLURALS.values(), chain(*COUNTABLES)),
        chain(*([f"one {one}", *(f"{n} {many}" for n in NUMBERS[2:])] for one, many in COUNTABLES)),
        *_lists().values(),
    ]
    return sorted(map(frozenset, tables), key=len)


def _told_by_tables() -> dict[str, list[tuple[str, Meaning]]]:
    """Fields of which every value, itself a template, says more than itself."""
    told: dict[str, list[tuple[str, Meaning]]] = defaultdict(list)
    for suffix in ("", "2", "3"):
        told["fine" + suffix] = [(look, _meaning("thing" + suffix, noun)) for look, noun in _looks()]
    for fear in growing.OUTDOOR_FEARS + growing.WATER_FEARS + growing.INDOOR_FEARS:
        for key, text in zip(("fear", "why", "step1", "step2", "step3"), (*fear[:2], *fear.steps), strict=True):
            told[key].append((text, {"dread": fear.name}))
    for plan in BUILDS:
        texts = {"failure": plan.failure, "success": plan.success}
        for k, part in enumerate(plan.parts, start=1):
            texts |= {f"part{k}": part, f"the_part{k}": "the " + part.split(" ", 1)[1]}
        for key, text in texts.items():
            told[key].append((text, {"thing": plan.noun}))
    for k, days in enumerate([words.GRAMMAR["weekday"]] * 3):
        told[f"put{k}"] = [(look, {f"put{k} is": noun}) for look, noun in _looks()]
        told[f"day{k + 1}"] = [(day, {"first day": days[n - k]}) for n, day in enumerate(days)]
    told["hint1"] = [(hint, {"group": group}) for group, hint in finding.GROUP_HINTS.items()]
    told["hint2"] = [(thing.riddle, {"thing": thing.noun}) for thing in THINGS]
    told["in_place"] = [(place.where, {"place": place.name}) for place in PLACES]
    told["to_place"] = [(place.whither, {"place": place.name}) for place in PLACES]
    return told


@cache
def _meaning(key: str, value: str) -> dict[str, str]:
    """What a field says of the story: {hero} and {he} both say whether it is a he, {thing} and {use} of what use."""
    stem = key.rstrip("1234")
    suffix, role = key[len(stem) :], key.removesuffix("_the")
    if stem.lower() in world.PRONOUNS["he"]:  # the fields are named by what they are for him
        return {"pronoun" + suffix: "he" if value.lower() == stem.lower() else "she"}
    if role in SUFFIXES:
        return _who(role, value)
    if stem == "kid":
        return {key: value, "is a child" + suffix: str(value in {being.kind for being in CHILDREN})}
    if stem == "thing":
        group = {"group" + suffix: world.THING_OF[value].group} if value in world.THING_OF else {}
        return {key: value, "article" + suffix: with_article(value).split(" ")[0]} | group
    if stem in ("use", "used", "using", "shared"):
        return {"group" + suffix: next(group for group, use in things.USES.items() if value in use)}
    if key.endswith("_spot"):
        return {key: value, key.replace("_spot", "_out"): places.out_of(value)}
    if key in ("start", "given", "given3"):
        number, _, noun = value.partition(" ")
        return {key: number, "many": _PLURALS.get(noun, noun)}
    return {"many": _PLURALS.get(value, value)} if key == "noun" else {key.removesuffix("_number"): value}


def _who(role: str, value: str) -> dict[str, str]:
    suffix, (name, _, kind) = SUFFIXES[role], value.partition(" the ")
    if role == "elder":
        return {role: name, "pronoun4": "she" if any(name in one["she"] for one in world.ELDERS.values()) else "he"}
    being = next(being for being in CHILDREN + CREATURES if being.name == name)
    who = {role: name, "pronoun" + suffix: being.pronoun, "is a child" + suffix: str(being.sort == "child")}
    return who | ({"kid" + suffix: kind or being.kind} if kind or being.kind else {})


# --- reading ---------------------------------------------------------------------------------------------------------


def _tokens(text: str) -> list[str]:
    """Words, marks and fields, each with the space before it: a word that is spaced otherwise is another token."""
    return re.findall(r" ?\{\w+\}[a-z]*| ?[A-Za-z]+| ?[^A-Za-z ]| ", text)


@dataclass(slots=True)
class _Node:
    """What may come next in some templates, and what the ones that end here tell."""

    words: dict[str, _Node] = field(default_factory=dict)
    slots: dict[Slot, _Node] = field(default_factory=dict)
    ends: list[Any] = field(default_factory=list)


def _tree(templates: Iterable[tuple[str, object]]) -> _Node:
    root = _Node()
    for template, told in ((variant, told) for option, told in templates for variant in expand(option)):
        node = root
        for token in _tokens(template):
            slot = re.fullmatch(r"( ?)\{([aA]_|)(\w+)\}([a-z]*)", token)
            node = node.slots.setdefault(slot.groups(), _Node()) if slot else node.words.setdefault(token, _Node())
        node.ends.append(told)
    return root


@dataclass(frozen=True)
class _Path:
    """One reading of a text so far: what is known of the story, the beats told, and what contradicts them."""

    cost: int = 0
    known: Meaning = field(default_factory=dict)
    plots: frozenset[str] = frozenset(plot.name for plot in PLOTS)
    told: tuple[int, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    lost: bool = False  # whether the last sentence is none of the grammar's

    def blame(self, kind: str, problem: str) -> _Path:
        cost = self.cost + (10 if kind == "grammar" else 1)  # rather a sentence that contradicts others than none
        return replace(self, cost=cost, problems=(*self.problems, (kind, problem)))


class _Grammar:
    """What was heard, and how a text is read with it. A beat is one call of World.say with all its options."""

    def __init__(self) -> None:
        self.beats: dict[tuple[str, ...], int] = {}
        self.plots: dict[int, set[str]] = defaultdict(set)  # that tell a beat
        self.always: dict[str, set[int]] = {}  # the beats of every story of a plot
        self.first, self.last = set[int](), set[tuple[str, int]]()  # beats, and with their plots
        self.before: set[tuple[int, int]] = set()
        self.recalls: dict[str, set[str]] = {}  # a field that tells something again -> the fields that told it
        self.seen: dict[str, Counter[str]] = defaultdict(Counter)  # field -> value -> in how many stories
        for number in range(LISTENED):
            self._note(_Listener(number))
        fixed = self.first | {beat for _, beat in self.last}
        wide = {beat for beat, plots in self.plots.items() if len(plots) >= WANDERS and beat not in fixed}
        self.plots |= {beat: {plot.name for plot in PLOTS} for beat in wide}
        self.before = {pair for pair in self.before if not wide.intersection(pair)}
        self.lists, self.told_by_tables = _lists(), _told_by_tables()
        self.tree = _tree((option, beat) for options, beat in self.beats.items() for option in options)
        self.trees: dict[tuple[str, str], _Node] = {}  # of the values of a field, by its key and suffix
        self.reached = 0  # the farthest token that the last attempt could read

    def _note(self, listener: _Listener) -> None:
        told = [self.beats.setdefault(options, len(self.beats)) for options in listener.beats]
        for k, beat in enumerate(told):
            self.plots[beat].add(listener.plot)
            self.before.update((earlier, beat) for earlier in told[:k])
        self.first.add(told[0])
        self.last.add((listener.plot, told[-1]))
        self.always[listener.plot] = self.always.get(listener.plot, set(told)) & set(told)
        for key, value in listener.fields.items():
            bare = value.strip(MARK_START + MARK_END)
            self.seen[key][bare] += 1
            if bare != value:
                same = {other for other, its in listener.fields.items() if its == bare}
                self.recalls[key] = self.recalls.get(key, same) & same

    def _options(self, key: str) -> Iterable[str]:
        """The list a field is drawn from; of one that plots set, all that was heard, or the list that it is from."""
        name, seen = key.rstrip("123456789"), self.seen[key]
        if name in self.lists or min(seen.values()) >= 5:  # heard so often, there is hardly any that was not
            return self.lists.get(name, seen)
        table = next((table for table in _tables() if seen.keys() <= table), seen)
        firsts = {value.split()[0] for value in seen}  # a plot may want only spots beside or behind something
        return {spot for spot in _SPOTS if spot.split()[0] in firsts} if table is _SPOTS else table

    def _fill(self, slot: Slot, tokens: list[str], at: int, known: Meaning) -> Iterator[tuple[int, Meaning]]:
        """Where a field that begins here can end, and what is known then."""
        space, article, field, suffix = slot
        key, begin, word = min(self.recalls.get(field) or {field}), at + bool(article), tokens[at].lstrip(" ")
        if tokens[at].startswith(" ") != bool(space) or begin == len(tokens):
            return
        if (key, suffix) not in self.trees:
            values = self.told_by_tables.get(key) or [(option + suffix, {}) for option in self._options(key)]
            self.trees[key, suffix] = _tree(values)
        tree, first = self.trees[key, suffix], tokens[begin].lstrip(" ")
        unspaced = [*tokens[:begin], first, *tokens[begin + 1 :]] if tree.slots or first in tree.words else []
        for end, told, more in self._match(tree, unspaced, begin, known) if unspaced else ():
            value = "".join(unspaced[begin:end]).removesuffix(suffix)
            wanted = with_article(value).split(" ")[0] if article else word
            says = told if key in self.lists else {**_meaning(key, value), **told}  # what lists give is drawn anew
            both = {**says, **more}
            if word == (wanted.capitalize() if article == "A_" else wanted) and says.items() <= both.items():
                yield end, both

    def _match(self, node: _Node, tokens: list[str], at: int, known: Meaning) -> Iterator[tuple[int, Any, Meaning]]:
        """All ways to read templates of a tree from here: where they end, what they tell, what is known then."""
        self.reached = max(self.reached, at)
        yield from ((at, told, known) for told in node.ends)
        if at < len(tokens):
            if tokens[at] in node.words:
                yield from self._match(node.words[tokens[at]], tokens, at + 1, known)
            for slot, after in node.slots.items():
                for end, more in self._fill(slot, tokens, at, known):
                    yield from self._match(after, tokens, end, more)

    def _beats_from(self, tokens: list[str], is_first: bool) -> list[tuple[int, int, Meaning]]:
        """The beats that can be read from the first of these tokens on."""
        self.reached, word = 0, tokens[0].lstrip(" ")
        if not word or word[0].islower() or tokens[0].startswith(" ") == is_first:
            return []
        firsts = sorted({word, word[0].lower() + word[1:]})  # the first letter of a beat was made a capital
        return [beat for first in firsts for beat in self._match(self.tree, [first, *tokens[1:]], 0, {})]

    def readings(self, text: str) -> list[_Path]:
        """The best readings of a text, and one at least."""
        paths = [_Path()]
        for tokens in (_tokens(paragraph) or [" "] for paragraph in text.split("\n")):
            waiting = defaultdict(list, {0: paths})
            for at in range(len(tokens)):
                here = sorted(waiting.pop(at, []), key=lambda path: path.cost)[:BEAM]
                found = self._beats_from(tokens[at : at + 200], at == 0) if here else []  # no beat is as long as that
                for length, beat, meaning in found:
                    sentence = "".join(tokens[at : at + length]).strip()
                    waiting[at + length] += [self._tell(path, beat, meaning, sentence) for path in here]
                if here and not found:
                    stops = (k for k in range(at + self.reached + 1, len(tokens)) if tokens[k - 1] in ".!?")
                    end = next((k + (tokens[k] == '"') for k in stops), len(tokens))
                    wrong = f'the grammar has no "{"".join(tokens[at:end]).strip()}"'  # several in a row are one
                    waiting[end] += [p if p.lost else replace(p.blame("grammar", wrong), lost=True) for p in here]
            paths = sorted(waiting[len(tokens)], key=lambda path: path.cost)[:BEAM]
        return paths

    def _tell(self, path: _Path, beat: int, meaning: Meaning, sentence: str) -> _Path:
        """The path with one more beat, and with what does not fit."""
        known, told, plots = path.known, path.told, path.plots & self.plots[beat]
        clashes = [variable for variable, value in meaning.items() if known.get(variable, value) != value]
        # One of each kind will do: with a thing its looks and its use change too.
        for clash in {variable in HERO: variable for variable in reversed(clashes)}.values():
            change = f'{clash} was "{known[clash]}" and is "{meaning[clash]}" in "{sentence}"'
            path = path.blame("hero" if clash in HERO else "world", change)
        if beat in self.first and told:
            path = path.blame("end", f'another story begins with "{sentence}"')
        elif beat not in self.first and not told and not path.lost:
            path = path.blame("hero", "it does not begin by telling who the hero is")
        elif beat in told:
            path = path.blame("world", f'"{sentence}" has been told before')
        elif not plots:
            path = path.blame("world", f'"{sentence}" is from a story of another kind')
        elif any((beat, one) in self.before and (one, beat) not in self.before for one in told):
            path = path.blame("world", f'"{sentence}" comes too late')
        return replace(path, known={**meaning, **known}, told=(*told, beat), plots=plots or path.plots, lost=False)

    def audit(self, path: _Path) -> Iterator[str]:
        """What only the whole story shows."""
        known = path.known
        spots = next((place.spots for place in PLACES if place.name == known.get("place")), tuple(_SPOTS))
        for spot in sorted(_SPOTS.difference(spots).intersection(known.values())):
            yield f"there is nothing {spot} in a {known['place']}"
        numbers = [known.get(key, "zero") for key in ("start", "given", "given3", "more", "left")]
        start, given, other, more, left = map(NUMBERS.index, numbers)
        if start and given and left and left != start - given - other + more:
            yield f"{start} - {given} - {other} + {more} is not {left}"
        put = {known[f"put{k} is"]: known[f"there{k}"] for k in range(3) if f"put{k} is" in known}
        if put and {"thing", "thing_spot"} <= known.keys() and put.get(known["thing"]) != known["thing_spot"]:
            yield f"the {known['thing']} is found {known['thing_spot']}, where it was not put"
        if len(path.plots) == 1 and path.cost < 10:
            missing = self.always[min(path.plots)].difference(path.told)
            yield from (f'it tells nothing like "{beat[0]}"' for beat, k in self.beats.items() if k in missing)


_grammar = cache(_Grammar)  # heard once in a process
