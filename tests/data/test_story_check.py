"""The checker of told stories: true stories pass, and stories that were broken in a known way do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from fuselm.data.stories import SPLITS, Facts, facts, story
from fuselm.data.story.check import Verdict, check, tally
from fuselm.data.story.places import PLACES
from fuselm.data.story.things import NUMBERS
from fuselm.data.story.world import CHILDREN, CREATURES, THING_OF

SEED = 31
BEINGS = {being.name: being for being in CHILDREN + CREATURES}
OTHER_PRONOUN = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
OTHER_PRONOUN |= {"she": "he", "her": "his", "herself": "himself"}

Breaking = Callable[[str, Facts, Random], str]


@pytest.fixture(scope="module")
def told() -> list[tuple[str, Facts]]:
    return [(story(SEED, k, split), facts(SEED, k, split)) for split in SPLITS for k in range(40)]


@pytest.fixture(scope="module")
def broken(told: list[tuple[str, Facts]]) -> Callable[[Breaking], list[Verdict]]:
    """Verdicts on the stories after they were broken; a story in which there is nothing to break is left out."""

    @cache
    def verdicts(breaking: Breaking) -> list[Verdict]:
        dice = Random(5)
        texts = [(text, breaking(text, true, dice)) for text, true in told]
        return [check(changed) for text, changed in texts if changed != text]

    return verdicts


def words(text: str) -> list[re.Match[str]]:
    return list(re.finditer(r"[A-Za-z]+(?:['-][A-Za-z]+)*", text))


def second_half(text: str, old: str, new: str) -> str:
    half = len(text) // 2
    return text[:half] + re.sub(rf"\b{old}\b", new, text[half:])


# --- ways to break a story -------------------------------------------------------------------------------------------


def broken_off(text: str, true: Facts, dice: Random) -> str:
    word = dice.choice([word for word in words(text)[10:] if text[word.end()] in " ,"])
    return text[: word.end()]


def swapped(text: str, true: Facts, dice: Random) -> str:
    pieces = re.split(r"( |\n)", text)
    both = [k for k in range(0, len(pieces) - 2, 2) if pieces[k + 1] == " " and pieces[k] != pieces[k + 2]]
    k = dice.choice([k for k in both if pieces[k].isalpha() and pieces[k + 2].isalpha()])
    pieces[k], pieces[k + 2] = pieces[k + 2], pieces[k]
    return "".join(pieces)


def doubled(text: str, true: Facts, dice: Random) -> str:
    word = dice.choice(words(text))
    return f"{text[: word.end()]} {word[0]}{text[word.end() :]}"


def dropped(text: str, true: Facts, dice: Random) -> str:
    word = dice.choice([word for word in words(text) if text[word.end() :].startswith(" ")])
    return text[: word.start()] + text[word.end() + 1 :]


def made_up(text: str, true: Facts, dice: Random) -> str:
    word = dice.choice(words(text))
    return f"{text[: word.start()]}glimpf{text[word.end() :]}"


def spaced_twice(text: str, true: Facts, dice: Random) -> str:
    word = dice.choice(words(text)[1:])
    return f"{text[: word.start()]} {text[word.start() :]}"


def without_a_capital(text: str, true: Facts, dice: Random) -> str:
    first = dice.choice(list(re.finditer(r"(?<=[.] )[A-Z]", text)))
    return text[: first.start()] + first[0].lower() + text[first.end() :]


def another_hero(text: str, true: Facts, dice: Random) -> str:
    """Of the same sort and pronoun, so that nothing but the name is wrong."""
    hero = BEINGS[true.hero]
    alike = [name for name, being in BEINGS.items() if being[1:] == hero[1:] and name not in text]
    return second_half(text, true.hero, dice.choice(alike))


def friend_as_hero(text: str, true: Facts, dice: Random) -> str:
    return second_half(text, true.hero, true.friend) if true.friend in text else text


def another_pronoun(text: str, true: Facts, dice: Random) -> str:
    """One pronoun in a sentence that has named the hero; now and then it is a friend's."""
    own = [word for word in words(text) if word[0].lower() in OTHER_PRONOUN]
    own = [word for word in own if re.search(rf"{true.hero}[^.]*$", text[: word.start()])]
    if not own:
        return text
    word = dice.choice(own)
    other = OTHER_PRONOUN[word[0].lower()]
    return text[: word.start()] + (other.capitalize() if word[0][0].isupper() else other) + text[word.end() :]


def all_pronouns(text: str, true: Facts, dice: Random) -> str:
    def turn(word: re.Match[str]) -> str:
        other = OTHER_PRONOUN.get(word[0].lower(), word[0])
        return other.capitalize() if word[0][0].isupper() else other

    return re.sub(r"[A-Za-z]+", turn, text)


def without_its_end(text: str, true: Facts, dice: Random) -> str:
    return text.rpartition("\n")[0]


def glued(text: str, true: Facts, dice: Random) -> str:
    return text + dice.choice("\n ") + story(77, dice.randrange(1000))


def without_its_beginning(text: str, true: Facts, dice: Random) -> str:
    return text.partition("\n")[2]


def drifting(text: str, true: Facts, dice: Random) -> str:
    """The first paragraph of one story and the rest of another."""
    return text.partition("\n")[0] + "\n" + story(77, dice.randrange(1000)).partition("\n")[2]


def with_an_empty_line(text: str, true: Facts, dice: Random) -> str:
    return text.replace("\n", "\n\n", 1)


def another_thing(text: str, true: Facts, dice: Random) -> str:
    """The thing turns into another one that is used alike, where both halves of the story name it."""
    if true.object not in THING_OF or not re.search(rf"\b{true.object}\b", text[: len(text) // 2]):
        return text
    group = THING_OF[true.object].group
    alike = [noun for noun in THING_OF if THING_OF[noun].group == group and noun not in text]
    return second_half(text, true.object, dice.choice(alike))


def another_spot(text: str, true: Facts, dice: Random) -> str:
    if true.spot is None:
        return text
    spots = next(place.spots for place in PLACES if place.name == true.place)
    spot = dice.choice([spot for spot in spots if spot not in text])
    at = text.rindex(true.spot) if true.spot in text else len(text)
    return text[:at] + text[at:].replace(true.spot, spot)


def wrong_sum(text: str, true: Facts, dice: Random) -> str:
    if true.plot != "count" or true.counts["hero"] < 3:
        return text
    left, wrong = NUMBERS[true.counts["hero"]], NUMBERS[true.counts["hero"] + 1]
    head, _, tail = text.rpartition(left)
    return head + wrong + tail


def told_twice(text: str, true: Facts, dice: Random) -> str:
    paragraphs = text.split("\n")
    return "\n".join([*paragraphs[:-1], *paragraphs[-2:]])


def without_its_middle(text: str, true: Facts, dice: Random) -> str:
    paragraphs = text.split("\n")
    return "\n".join(paragraphs[:1] + paragraphs[2:]) if len(paragraphs) > 2 else text


# --- tests -----------------------------------------------------------------------------------------------------------


def test_true_stories_of_both_splits_have_no_problems(told: list[tuple[str, Facts]]) -> None:
    for text, _ in told:
        assert check(text) == Verdict(True, True, True, (), True), text


@pytest.mark.parametrize(
    ("breaking", "flag", "at_least"),
    [
        (broken_off, "grammatical", 1.0),
        (broken_off, "ends", 1.0),
        (swapped, "grammatical", 0.99),
        (doubled, "grammatical", 1.0),
        (dropped, "grammatical", 0.97),  # a thing with one adjective less may be a thing as well
        (made_up, "grammatical", 1.0),
        (spaced_twice, "grammatical", 1.0),
        (without_a_capital, "grammatical", 1.0),
        (with_an_empty_line, "grammatical", 1.0),
        (another_hero, "keeps_hero", 1.0),
        (friend_as_hero, "keeps_hero", 0.97),  # what is left of it is not grammatical
        (friend_as_hero, "good", 1.0),
        (another_pronoun, "good", 0.95),  # the others are a friend's, and not consistent
        (all_pronouns, "keeps_hero", 0.6),  # within a sentence with the name it is not grammatical
        (all_pronouns, "good", 1.0),
        (without_its_end, "ends", 1.0),
        (without_its_beginning, "keeps_hero", 1.0),
        (glued, "ends", 1.0),
        (drifting, "good", 1.0),
    ],
)
def test_broken_stories_are_caught(
    broken: Callable[[Breaking], list[Verdict]], breaking: Breaking, flag: str, at_least: float
) -> None:
    verdicts = broken(breaking)
    assert len(verdicts) > 30
    caught = [verdict for verdict in verdicts if not getattr(verdict, flag)]
    assert len(caught) >= at_least * len(verdicts)
    assert all(verdict.problems and not verdict.good for verdict in caught)


@pytest.mark.parametrize(
    ("breaking", "at_least"),
    [(another_thing, 45), (another_spot, 30), (wrong_sum, 2), (told_twice, 75), (without_its_middle, 70)],
)
def test_stories_that_contradict_themselves_are_reported(
    broken: Callable[[Breaking], list[Verdict]], breaking: Breaking, at_least: int
) -> None:
    verdicts = broken(breaking)
    assert len(verdicts) >= at_least
    assert all(verdict.problems for verdict in verdicts)
    assert sum(verdict.consistent for verdict in verdicts) <= 0.1 * len(verdicts)  # some are not even grammatical


def test_problems_name_what_is_wrong(told: list[tuple[str, Facts]]) -> None:
    text, true = told[0]
    problems = check(second_half(text, true.hero, "Zoe" if true.hero != "Zoe" else "Yara")).problems
    assert any(f'hero was "{true.hero}"' in problem for problem in problems)
    assert check(text + " Then came a glimpf.").problems[0] == 'the grammar has no "Then came a glimpf."'


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_no_story(text: str) -> None:
    assert check(text) == Verdict(False, False, False, ("there is no text",), False)


@pytest.mark.parametrize("text", ["x", "!", '"', "{hero} was {glad}.", "\u00e9t\u00e9", "Once\n\nthere", "1 2 3" * 400])
def test_any_text_gets_a_verdict(text: str) -> None:
    verdict = check(text)
    assert not verdict.grammatical
    assert not verdict.ends


def test_a_story_that_was_cut_off_does_not_end(told: list[tuple[str, Facts]]) -> None:
    verdict = check(told[0][0], finished=False)
    assert verdict.grammatical
    assert verdict.keeps_hero
    assert not verdict.ends
    assert not verdict.good


def test_space_around_a_story_does_not_matter(told: list[tuple[str, Facts]]) -> None:
    assert check(f"\n{told[0][0]} \n").good


def test_verdicts_do_not_depend_on_the_texts_before(told: list[tuple[str, Facts]]) -> None:
    texts = [dropped(text, true, Random(k)) for k, (text, true) in enumerate(told[:20])]
    assert [check(text) for text in reversed(texts)][::-1] == [check(text) for text in texts]


def test_a_tally_counts_what_is_right() -> None:
    verdicts = [
        Verdict(True, True, True, ()),
        Verdict(True, False, True, ("another hero",)),
        Verdict(False, True, False, ("no sentence",), False),
    ]
    assert tally(iter(verdicts)) == {
        "stories": 3,
        "grammatical": 2,
        "keep_hero": 2,
        "end": 2,
        "good": 1,
        "consistent": 2,
    }
    assert tally([]) == dict.fromkeys(("stories", "grammatical", "keep_hero", "end", "good", "consistent"), 0)
