"""Beats that many plots share: who the hero is, where and when, remarks by the way, the moral, the night after.

Every beat takes the world, may change it, and tells it. Remarks are about the hero or about nobody, for they may fall
anywhere between two beats of a plot; none is made twice in a story, and a long story makes fewer.

    introduce_owner(world)
    arrive(world)
    remark(world, percent=50)
    moral(world, "a thing needs a place of its own")
"""

from __future__ import annotations

from collections.abc import Callable

from fuselm.data.story.places import SKY_REMARKS
from fuselm.data.story.world import World

# The longest plots tell about 100 words after their last remark, and no story may have more than 250.
LONG_ENOUGH = 100
MINIMUM_WORDS = 70  # a shorter story always has its moral, and so never less than 60 words


def introduce(w: World) -> None:
    """Who the hero is."""
    w.say(
        "[Once|Once upon a time|Long ago] there was {a_trait} [little|young] {kid} [named|called] {hero}.",
        "[Once there|There once] lived {a_trait} {kid} [named|called] {hero}.",
        "{hero} was {a_trait} [little|young] {kid} who [loved|liked] to {hobby}.",
        "{home} lived {a_trait} {kid} named {hero}.",
        "{hero} was {a_trait} {kid} who lived {home}.",
        "This is [a story about|the story of] {hero}, {a_trait} [little|young] {kid}.",
        "{hero} the {kid} lived {home}." if w.cast["hero"].sort != "child" else "{hero} lived {home}.",
    )
    w.maybe(
        15,
        "{He} [loved|liked] to {hobby}.",
        "[Most of all|More than anything|On quiet days], {he} liked to {hobby}.",
        "[Everyone knew|The neighbors said|People said] that nobody could {hobby} like {hero}.",
    )


def introduce_owner(w: World) -> None:
    """Who the hero is, and that the thing is the hero's from the start."""
    w.hold("thing", "hero")
    if w.chance(35):
        w.say(
            "{hero} was {a_trait} {kid} who had {athing}.",
            "[Once|Once upon a time|Long ago] there was {a_trait} {kid} [named|called] {hero}, who had {athing}.",
            "There once was {a_trait} {kid} named {hero}, who [never went anywhere without|was very fond of] {his} "
            "{fine}.",
            "{hero} the {kid} had {athing}."
            if w.cast["hero"].sort != "child"
            else "A {kid} named {hero} had {athing}.",
        )
        return
    introduce(w)
    w.say(
        "{His} favorite thing [in the world|of all] was {athing}.",
        "{He} had {athing}, [a gift|a present] from {elder}.",
        "{hero} had {athing} and took it [everywhere|wherever {he} went].",
        "{He} owned {athing} and was very proud of it.",
        "Of all {his} things, {hero} loved {his} {fine} the most.",
        "{elder} had once given {him} {athing}, and {hero} [treasured it|kept it close].",
        "[Nothing|There was nothing that] made {hero} happier than {his} {fine}.",
    )


def arrive(w: World) -> None:
    """When, and where to."""
    w.say(
        "One {sky} {time}, {he} [went|strolled|set off] {to_place}.",
        "One {sky} {time}, {hero} was {in_place}.",
        "It was {a_sky} {time}, and {hero} was [busy|all alone|humming] {in_place}.",
        "On {a_sky} {weekday} {time}, {hero} {strolled} {to_place}.",
        "One {time}, when the weather was {sky}, {he} {strolled} {to_place}.",
        "It all began {in_place}, on {a_sky} {time}.",
        "{hero} was {in_place} one {sky} {time}.",
    )
    breakfast(w)


def meet(w: World) -> None:
    """The friend comes in."""
    w.say(
        "There {he} met {friend_the}.",
        "{His} friend {friend_the} [was there too|came along|was already waiting].",
        "{hero} [saw|spotted|ran into] {friend_the} there.",
        "Soon {friend_the} came [by|along|running up].",
    )


# --- remarks ---------------------------------------------------------------------------------------------------------


def remark(w: World, percent: int = 50) -> None:
    """Perhaps a word about the weather, a song, or whoever passes by."""
    if w.num_words >= LONG_ENOUGH or not w.chance(percent):
        return
    name = w.dice.pick(_OUTDOOR_REMARKS if w.place.outdoors else _INDOOR_REMARKS)
    if name not in w.told:
        w.told.add(name)
        _REMARKS[name](w)


def meal(w: World, percent: int = 35) -> None:
    """Perhaps what there was to eat, between one part of the day and the next; toys do not eat."""
    if w.cast["hero"].sort == "toy" or w.num_words >= LONG_ENOUGH or not w.chance(percent):
        return
    if w.clock == 0:
        w.clock = 1  # what comes after lunch is the afternoon
        w.say(
            "{elder} had packed {snack} for lunch, with {drink} to go with it.",
            "Then it was time for lunch. There was {dish}, and after that {sweet}.",
            "For lunch they had {dish} with {drink}.",
            "At noon {hero} ate {snack} and drank some {drink}.",
        )
    elif w.clock < 3:
        w.say(
            "{hero} ate {snack} and drank some {drink}.",
            "When {he} got hungry, there was {sweet} with {drink}.",
            "Soon the smell of {dish} was in the air.",
        )


def breakfast(w: World, percent: int = 15) -> None:
    """Perhaps how the day began."""
    if w.cast["hero"].sort != "toy" and w.clock == 0:
        w.maybe(
            percent,
            "For breakfast there had been {breakfast} and {morning_drink}.",
            "{hero} was still full of {breakfast} from breakfast.",
        )


def _weather(w: World) -> None:
    w.say(*SKY_REMARKS[w.sky])


def _bird(w: World) -> None:
    w.say(
        "{a_bird} {flew}.",
        "[Overhead|On a chimney|On a wire], {a_songbird} sang.",
        "Just then {a_bird} {flew}.",
        "{hero} [looked up|stopped to look] when {a_bird} {flew}.",
    )


def _beast(w: World) -> None:
    w.say(
        "{a_beast} {crept}.",
        "Just then {a_beast} {crept}.",
        "[Not far away|Close by], {a_color} {bug} {buzzed}.",
        "{a_bug} {buzzed}, and {hero} [held still|smiled|watched it].",
    )


def _worker(w: World) -> None:
    w.say(
        "[Along|Down the road] came {worker}.",
        "{hero} waved to {worker}.",
        "{worker} went by and said hello.",
        "{worker} [passed by|nodded kindly|tipped a hat].",
    )


def _song(w: World) -> None:
    w.say(
        "{hero} hummed a song about {tale}.",
        "{hero} thought of the [story|book|picture] about {tale}.",
        "To pass the time, {hero} made up a rhyme about {tale}.",
        "Somewhere a radio was playing a song about {tale}.",
        "{hero} remembered a [joke|riddle|poem] about {tale} and giggled.",
    )


def _scenery(w: World) -> None:
    w.say(
        "The {flower} were in bloom, and the {tree} trees [swayed|rustled|whispered].",
        "There were {flower} and {flower} [along the path|everywhere|in bloom].",
        "{a_tree} leaf [floated|drifted] down and landed on {his} head.",
        "A bell rang [far away|in the distance], and a dog barked.",
    )


def _sound(w: World) -> None:
    w.say(
        "Something went {sound} next door.",
        "{sound}! That was only [the wind|a shutter|the cat|a falling broom].",
        "It smelled of [soap|cinnamon|old wood|wax|fresh bread|paint|lavender] there.",
        "A clock struck [three|four|ten|eleven].",
        "The floorboards creaked under {his} feet.",
    )


_REMARKS: dict[str, Callable[[World], None]] = {
    "weather": _weather,
    "bird": _bird,
    "beast": _beast,
    "worker": _worker,
    "song": _song,
    "scenery": _scenery,
    "sound": _sound,
}
_OUTDOOR_REMARKS = ("weather", "bird", "beast", "worker", "song", "song", "scenery")
_INDOOR_REMARKS = ("weather", "song", "sound")


# --- endings ---------------------------------------------------------------------------------------------------------


def moral(w: World, *morals: str, elder: bool = False) -> None:
    """What the hero learned; with `elder` that one is there to say it.

    Most stories do without. A story that has lost sight of its hero does not: everybody is named at the end.
    """
    is_named = w.cast["hero"].name in " ".join(w.sentences[-2:])[-150:]
    if is_named and w.num_words > MINIMUM_WORDS and not w.chance(40):
        return
    lesson = w.dice.pick(morals)
    forms = [
        f"{{hero}} had learned that {lesson}.",
        f"From that day on, {{hero}} knew that {lesson}.",
        f"And that is how {{hero}} learned that {lesson}.",
        f"{{hero}} never forgot that {lesson}.",
        f"That day {{hero}} found out that {lesson}.",
        f"Since then, {{hero}} has always known that {lesson}.",
        f"Now {{hero}} understood that {lesson}.",
    ]
    if elder:
        forms.append(f'"You see, {{hero}}," said {{elder}}, "{lesson}."')
        forms.append(f'{{elder}} hugged {{hero}}. "Now you know that {lesson}," {{he4}} said.')
    w.say(w.dice.pick(forms))


def night(w: World, percent: int = 12) -> None:
    """Perhaps the evening after."""
    if w.num_words < 180:
        w.maybe(
            percent,
            "That night {hero} dreamed of {tale}.",
            "That evening {hero} fell asleep [with a smile|before the moon was up|in the middle of a yawn].",
            "At bedtime {hero} asked for the story about {tale}.",
            "When the stars came out, {hero} was already fast asleep.",
            "And {hero} slept [soundly|well|like a log] that night.",
        )
