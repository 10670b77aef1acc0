"""The built-in corpus: always the same, never shared between the splits, true to itself, and English.

Most tests look at a sample of stories; two look at every template and every phrase there is, drawn or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

import pytest

from fuselm.data.stories import PLOTS, SPLITS, Facts, facts, is_held_out, problems, stories, story
from fuselm.data.story import world as story_world
from fuselm.data.story.dealing import SINGULARS
from fuselm.data.story.places import FROM, PLACES, SKY_ADJECTIVES
from fuselm.data.story.things import NUMBERS, THINGS
from fuselm.data.story.words import BOYS, GIRLS, GRAMMAR, HE_CREATURES, SHE_CREATURES
from fuselm.data.story.world import CHILDREN, CREATURES, ELDERS, Dice, World, expand, with_article

ENDINGS = {
    "share": {"helped", "forgiven"},
    "sick": {"well", "returned"},
    "promise": {"kept", "broken"},
    "trade": {"traded", "traded back"},
    "errand": {"remembered", "went back"},
    "race": {"won", "tied"},
    "honest": {"told", "confessed"},
    "plant": {"grew", "revived"},
}


class Sample(NamedTuple):
    split: str
    text: str
    facts: Facts


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    sizes = {"train": 2500, "valid": 1000}
    return [Sample(split, story(1, k, split), facts(1, k, split)) for split in SPLITS for k in range(sizes[split])]


def of_plot(samples: list[Sample], *plots: str) -> list[Sample]:
    found = [sample for sample in samples if sample.facts.plot in plots]
    assert len(found) > 20 * len(plots)
    return found


def word_forms(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:['-][a-z]+)*", text.lower())


# --- always the same -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("train", "d903f11e61cbeba09ee28f1b58972e92adeaf829b2d84a11e5ba4545abbf3682"),
        ("valid", "0700ea5604b31345eaf5746ad359c2609811c5652a31ff5e938980ee906eabec"),
    ],
)
def test_the_first_thousand_stories_are_these_on_every_machine(split: str, digest: str) -> None:
    text = "\n\n".join(islice(stories(0, split=split), 1000))
    assert sha256(text.encode()).hexdigest() == digest


def test_dice_are_these_on_every_machine() -> None:
    dice = Dice(7, 0, 3)
    assert [dice.below(1000) for _ in range(20)] == [
        399,
        51,
        26,
        978,
        223,
        669,
        400,
        149,
        722,
        655,
        728,
        599,
        389,
        731,
        99,
        848,
        860,
        121,
        14,
        807,
    ]


def test_a_story_does_not_depend_on_the_stories_told_before() -> None:
    in_order = list(islice(stories(5), 30))
    assert [story(5, k) for k in reversed(range(30))] == in_order[::-1]
    assert list(islice(stories(5, start=20), 10)) == in_order[20:]


def test_seeds_and_splits_tell_different_stories() -> None:
    texts = [story(seed, k, split) for seed in (0, 1, -1) for split in SPLITS for k in range(200)]
    assert len(set(texts)) == len(texts)


# --- the splits ------------------------------------------------------------------------------------------------------


def test_keys_of_valid_are_never_told_in_train(samples: list[Sample]) -> None:
    for split, _, true in samples:
        assert is_held_out(true.plot, true.hero, true.object, true.place) == (split == "valid")


def test_one_key_in_thirty_two_is_held_out() -> None:
    dice, held_out, tries = Dice(2), 0, 20_000
    for _ in range(tries):
        plot = dice.pick(PLOTS)
        hero, noun, place = dice.pick(plot.heroes), dice.pick(plot.objects), dice.pick(plot.places)
        held_out += is_held_out(plot.name, hero.name, noun, place.name)
    assert 0.9 / 32 < held_out / tries < 1.1 / 32


def test_no_text_is_in_both_splits_whatever_the_seed() -> None:
    train = {story(seed, k, "train") for seed in range(3) for k in range(300)}
    valid = {story(seed, k, "valid") for seed in range(3) for k in range(300)}
    assert not train & valid


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="one of train, valid, not 'test'"):
        story(0, 0, "test")


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="numbered from 0"):
        facts(0, -1)


# --- what is told is true --------------------------------------------------------------------------------------------


def test_names_objects_places_and_hiding_places_stay(samples: list[Sample]) -> None:
    wrong = {text: found for _, text, true in samples if (found := problems(text, true))}
    assert wrong == {}


def test_problems_are_noticed() -> None:
    index = next(k for k in range(1000) if facts(0, k).plot == "lost")
    text, true = story(0, index), facts(0, index)
    assert true.spot is not None
    assert problems(text, true) == []
    last = text.rindex(true.spot)
    moved = text[:last] + "on the moon" + text[last + len(true.spot) :]
    while moved.count(true.spot) > 1:
        moved = "on the moon".join(moved.rsplit(true.spot, 1))
    assert problems(moved, true) == [f"what was put {true.spot} is not found there"]
    renamed = text[: len(text) // 2] + text[len(text) // 2 :].replace(true.hero, "Somebody")
    assert problems(renamed, true) == [f"{true.hero} is not named in the end"]
    assert problems(text.replace(true.place, "desert"), true) == [f"there is no {true.place} in it"]


def test_every_plot_and_every_ending_occurs_in_both_splits(samples: list[Sample]) -> None:
    for split in SPLITS:
        told: dict[str, set[str]] = {}
        for sample in samples:
            if sample.split == split:
                told.setdefault(sample.facts.plot, set()).add(sample.facts.ending)
        assert told.keys() == {plot.name for plot in PLOTS}
        assert all(len(endings) == 1 for plot, endings in told.items() if plot not in ENDINGS)
        assert {plot: told[plot] for plot in ENDINGS} == ENDINGS


def test_probes_point_at_their_answers(samples: list[Sample]) -> None:
    for _, text, true in samples:
        for offset, answer in true.probes:
            assert text.startswith(answer, offset)


def test_answers_were_told_before_they_are_asked_for(samples: list[Sample]) -> None:
    retold = (
        "lost",
        "surprise",
        "hunt",
        "tidy",
        "rescue",
        "small",
        "trade",
        "lend",
        "errand",
        "message",
        "race",
        "build",
    )
    for _, text, true in of_plot(samples, *retold):
        assert true.probes
        for offset, answer in true.probes:
            assert answer.lower() in text[:offset].lower(), text


def test_counts_add_up(samples: list[Sample]) -> None:
    for _, text, true in of_plot(samples, "count"):
        counts = true.counts
        given = [counts[taker] for taker in ("friend", "other") if taker in counts]
        assert counts["hero"] == counts["start"] + counts.get("found", 0) - sum(given)
        numbers = [word for word in re.findall(r"\w+", text) if word in NUMBERS]
        told = [counts["start"], *given, *([counts["found"]] if "found" in counts else []), counts["hero"]]
        # Every number that is told, in this order; a number may be told twice ("two pears? ... two").
        rest = iter(numbers)
        assert all(NUMBERS[count] in rest for count in told), text
        left = NUMBERS[counts["hero"]]
        assert f"{left} {SINGULARS[true.object] if counts['hero'] == 1 else true.object}" in text


def test_days_of_practice_follow_one_another(samples: list[Sample]) -> None:
    week = GRAMMAR["weekday"]
    for _, text, true in of_plot(samples, "fear"):
        days = re.findall(r"(?:[Oo]n|came) (\w+day)\b(?! (?:morning|afternoon))", text)
        assert len(days) == 3, text
        first = week.index(days[0])
        assert days == [week[(first + k) % 7] for k in range(3)]
        assert true.probes[0][1] == days[2]


def test_riddles_describe_the_answer(samples: list[Sample]) -> None:
    riddles = {thing.noun: thing.riddle for thing in THINGS}
    for _, text, true in of_plot(samples, "riddle"):
        (offset, answer) = true.probes[0]
        assert answer == true.object
        assert riddles[answer] in text[:offset]


# Of an ending: what was done before, what came of it, and what never comes of it.
CONSEQUENCES = {
    "kept": (r"promise|gave \w+ word", r"kept your (promise|word)", r"not allowed|lent \w+ nothing"),
    "broken": (r"promise|gave \w+ word", r"not allowed|lent \w+ nothing", r"kept your"),
    "helped": (r"half|share", r"came up with|swam|fetched|brought|dropped|carried|back with|pushed|smiling", r"sorry"),
    "forgiven": (r"nothing|ate it", r"sorry|forgive me", r"One half for you|we will share"),
    "told": (r"broke\b|broken|pieces", r"I broke your", r"hid them|put them"),
    "confessed": (r"hid them|put them", r"I broke your", r"at once,? I"),
    "traded back": (r"trade|for your|for my", r"got back|traded back|went home with", r"good trade"),
    "won": (
        r"far behind|steady|kept running",
        r"the winner|had won|first to stand",
        r"Lean on me|forgot all about the race",
    ),
}


def test_endings_follow_from_what_was_done(samples: list[Sample]) -> None:
    told = [sample for sample in samples if sample.facts.ending in CONSEQUENCES]
    assert {sample.facts.ending for sample in told} == CONSEQUENCES.keys()
    for _, text, true in told:
        cause, effect, contrary = CONSEQUENCES[true.ending]
        done = re.search(cause, text)
        assert done, text
        assert re.search(effect, text[done.end() :]), text
        assert not re.search(contrary, text), text


def test_pronouns_fit_the_names(samples: list[Sample]) -> None:
    pronoun = dict.fromkeys(GIRLS + SHE_CREATURES, "she") | dict.fromkeys(BOYS + HE_CREATURES, "he")
    elders = {name: which for table in ELDERS.values() for which, names in table.items() for name in names}
    others = {"she": {"he", "him", "his", "himself"}, "he": {"she", "her", "herself"}}
    checked = 0
    for _, text, true in samples:
        assert true.pronoun == pronoun[true.hero]
        named = {pronoun[word] for word in re.findall(r"[A-Z][a-z]+", text) if word in pronoun}
        if true.elder in text:
            named.add(elders[true.elder])
        if len(named) == 1 and true.plot != "rescue":  # in which the mother of a foundling comes
            assert not others[named.pop()] & set(word_forms(text)), text
            checked += 1
    assert checked > 300


# --- it is English ---------------------------------------------------------------------------------------------------


def blemishes(text: str) -> Iterator[str]:
    """What no told text may have: in whole stories and in single sentences."""
    if not text.isascii() or re.search(r"[{}\[\]|_\\\x00-\x09\x0b-\x1f]", text):
        yield "a mark that is not text"
    if re.search(r"  | \n|\n | [,.!?]|^ | $", text):
        yield "a stray space"
    if re.search(r"\b(a a|an an|a an|the the|to to|the a)\b", text, re.IGNORECASE):
        yield "a doubled article"
    for article, word in re.findall(r"\b(an?) ([a-z]+)", text, re.IGNORECASE):
        by_sound = (
            word[0].lower() in "aeiou" and word not in ("unicorn", "unicycle", "ukulele", "useful")
        ) or word == "hour"
        if by_sound != (article.lower() == "an"):
            yield f"{article} {word}"


def test_stories_have_no_blemishes(samples: list[Sample]) -> None:
    assert {found for _, text, _ in samples for found in blemishes(text)} == set()


def test_sentences_begin_with_capitals_and_end_with_stops(samples: list[Sample]) -> None:
    for _, text, _ in samples:
        for paragraph in text.split("\n"):
            assert re.match(r'"?[A-Z]', paragraph), paragraph
            assert re.search(r'[.!?]"?$', paragraph), paragraph
            assert paragraph.count('"') % 2 == 0, paragraph
            # After a stop comes a capital; only after a quoted question or exclamation may the sentence go on.
            assert not re.search(r'(?<!\.\.)\."? "?[a-z]|[!?] "?[a-z]', paragraph), paragraph


def test_stories_are_short_and_not_too_short(samples: list[Sample]) -> None:
    lengths = [len(text.split()) for _, text, _ in samples]
    assert min(lengths) >= 60
    assert max(lengths) <= 250
    assert 120 < sum(lengths) / len(lengths) < 155


def test_vocabulary_is_large_and_shared_by_the_splits(samples: list[Sample]) -> None:
    forms = {split: {w for s in samples if s.split == split for w in word_forms(s.text)} for split in SPLITS}
    assert len(forms["train"]) > 3300
    assert len(forms["valid"] - forms["train"]) < 0.05 * len(forms["valid"])


def test_there_are_many_heroes_of_three_sorts(samples: list[Sample]) -> None:
    assert len({sample.facts.hero for sample in samples}) > 250
    names = [being.name for being in CHILDREN + CREATURES]
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.endswith("s")]


def test_openings_vary(samples: list[Sample]) -> None:
    openings: dict[str, int] = {}
    for _, text, true in samples:
        start = " ".join(text.replace(true.hero, "NAME").split()[:5])
        openings[start] = openings.get(start, 0) + 1
    assert len(openings) > 500
    assert max(openings.values()) < len(samples) / 10


# --- every sentence there is -----------------------------------------------------------------------------------------


def test_every_template_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a beat is told, all its alternatives are filled from the world as it is then."""
    seen: set[tuple[str, ...]] = set()
    wrong: list[tuple[str, str]] = []
    say = World.say

    def say_all(world: World, *options: str) -> None:
        if options not in seen:
            seen.add(options)
            for template in (variant for option in options for variant in expand(option)):
                text = template.format_map(world.fields).replace("\x01", "").replace("\x02", "")
                wrong.extend((template, blemish) for blemish in blemishes(text))
                assert re.search(r'[.!?]"?$', text), template
        say(world, *options)

    monkeypatch.setattr(World, "say", say_all)
    for k in range(1500):
        story(3, k)
    assert wrong == []
    assert sum(len(options) for options in seen) > 900


def test_every_phrase_of_the_grammar_can_be_filled() -> None:
    for name, phrases in story_world._LISTS.items():
        for variant in (variant for phrase in phrases for variant in expand(phrase)):
            world = World(Dice(1), "lost", CHILDREN[0], "ball", PLACES[0])
            text = variant.format_map(world.fields)
            assert not list(blemishes(text)), (name, variant)


def test_every_word_that_takes_an_article_gets_the_right_one() -> None:
    lists = (
        "trait",
        "nice",
        "bird",
        "songbird",
        "bug",
        "beast",
        "tree",
        "color",
        "tale_who",
        "tale_adj",
        "round_thing",
    )
    words = [word for name in lists for word in GRAMMAR[name]]
    words += [word for adjectives in SKY_ADJECTIVES.values() for word in adjectives]
    words += [noun for plot in PLOTS if plot.name != "count" for noun in plot.objects if not noun.startswith("a ")]
    assert [found for word in words for found in blemishes(with_article(word))] == []


def test_every_place_has_six_spots_of_known_prepositions() -> None:
    for place in PLACES:
        assert len(set(place.spots)) == 6, place.name
        kinds = {spot.partition(" ")[0] for spot in place.spots}
        assert kinds >= {"beside", "behind", "under"}, place.name
        assert kinds <= FROM.keys(), place.name


# --- the world -------------------------------------------------------------------------------------------------------


def a_world() -> World:
    return World(Dice(4), "lost", CHILDREN[0], "ball", PLACES[0])


def test_a_thing_is_found_where_it_was_put() -> None:
    world = a_world()
    spot = world.a_spot()
    world.hold("thing", "hero")
    world.put("thing", "hero", spot)
    world.find("thing", "friend")
    world.say("It was {thing_found}.")
    assert world.text() == f"It was \x01{spot}\x02."
    assert world.holder == {"thing": "friend"}
    assert world.lies == {}


def test_nobody_gives_or_puts_away_what_somebody_else_has() -> None:
    world = a_world()
    world.hold("thing", "hero")
    with pytest.raises(AssertionError, match="which hero has"):
        world.give("thing", "friend", "elder")
    with pytest.raises(AssertionError, match="which hero has"):
        world.put("thing", "friend", world.a_spot())


def test_time_only_goes_forward() -> None:
    for seed in range(20):
        world = World(Dice(seed), "lost", CHILDREN[0], "ball", PLACES[0])
        clocks = [world.clock]
        for _ in range(5):
            world.advance()
            clocks.append(world.clock)
        assert clocks == sorted(clocks)
        assert clocks[-1] == 3


def test_a_field_with_a_digit_stays_the_same() -> None:
    world = a_world()
    assert len({"{bird1}".format_map(world.fields) for _ in range(20)}) == 1
    assert len({"{bird}".format_map(world.fields) for _ in range(20)}) > 5


def test_alternatives_in_brackets_are_all_there() -> None:
    assert expand("[One|Two] {hero} [x|]!") == ("One {hero} x!", "One {hero} !", "Two {hero} x!", "Two {hero} !")


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ("owl", "an owl"),
        ("unicorn", "a unicorn"),
        ("umbrella", "an umbrella"),
        ("ukulele", "a ukulele"),
        ("yo-yo", "a yo-yo"),
    ],
)
def test_articles_go_by_sound(phrase: str, expected: str) -> None:
    assert with_article(phrase) == expected
