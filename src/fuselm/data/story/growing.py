"""Plots about growing: a fear overcome, a race, something built, something planted.

Each plot takes a world and tells it to its end. The ending follows from what the hero did at the turn of the story.
"""

from __future__ import annotations

from typing import NamedTuple

from fuselm.data.story.beats import arrive, introduce, introduce_owner, meet, moral, night, remark
from fuselm.data.story.things import BUILDS
from fuselm.data.story.words import GRAMMAR
from fuselm.data.story.world import World, number

# --- a fear ----------------------------------------------------------------------------------------------------------


class Fear(NamedTuple):
    """Something to be afraid of, three steps toward it, and how it feels when it is done."""

    name: str
    reason: str
    steps: tuple[str, str, str]
    done: str


WATER = frozenset(("beach", "river", "pond", "lake", "harbor", "island"))
OUTDOOR_FEARS = (
    Fear(
        "climbing the big {tree1} tree",
        "it was as tall as a house",
        ("touched the lowest branch", "sat on the lowest branch and swung {his} legs", "climbed up to the very top"),
        "From up there {he} could see [the whole world|seven rooftops|as far as the sea].",
    ),
    Fear(
        "the wobbly bridge",
        "it swayed and creaked at every step",
        ("put one foot on the first plank", "walked to the middle and back", "walked all the way across"),
        "On the other side {he} [danced a jig|threw {his} arms up|found a field of {flower}].",
    ),
    Fear(
        "the neighbor's big dog",
        "it had a very deep bark",
        ("looked at the dog from far away", "let the dog sniff {his} hand", "scratched the dog behind the ears"),
        "The dog wagged its tail and [licked {his} nose|rolled over|gave {him} its paw].",
    ),
    Fear(
        "the long, steep slide",
        "it looked as high as a tower",
        ("climbed up halfway and came down again", "sat at the top with {elder}", "let go and went down alone"),
        "Whoosh! It was over so fast that {he} [went again|laughed out loud|wanted ten more turns].",
    ),
    Fear(
        "the tunnel under the road",
        "every sound came back as an echo",
        ("called hello into it", "went in for ten steps", "walked through it to the other end"),
        "The echo [laughed with {him}|said hooray|sounded like a friend].",
    ),
)
WATER_FEARS = (
    Fear(
        "deep water",
        "{he} could not see the bottom",
        ("put {his} toes in", "went in up to {his} knees", "swam without holding on"),
        "{He} swam in a circle, and the water [held {him} up|sparkled all around {him}|was not so cold after all].",
    ),
    Fear(
        "jumping in",
        "the water looked so far down",
        ("sat on the edge and splashed with {his} feet", "slid in slowly", "held {his} nose and jumped"),
        "Splash! {He} came up [laughing|like a cork|with a grin].",
    ),
    Fear(
        "the little boat",
        "it rocked from side to side",
        ("touched it with one finger", "sat in it while it was tied up", "rowed out a little way"),
        "The boat rocked like a cradle, and {he} [liked it|began to sing|saw a fish].",
    ),
)
INDOOR_FEARS = (
    Fear(
        "the dark corner at the back",
        "anything could be hiding there",
        ("stood at the edge and counted to three", "took five steps into the dark", "walked right up to the wall"),
        "There was nothing there but {junk}.",
    ),
    Fear(
        "singing in front of others",
        "everybody would look at {him}",
        ("sang to the mirror", "sang to {elder}", "stood on a chair and sang to everyone"),
        "It was a song about {tale}, and everyone clapped.",
    ),
    Fear(
        "the tall ladder",
        "it shook when you touched it",
        ("stood on the first rung", "climbed up three rungs", "climbed up to the last rung"),
        "From up there everything looked [small|funny|like a dollhouse].",
    ),
    Fear(
        "talking to new people",
        "{his} voice always got stuck",
        ("waved to somebody", "said hello in a very small voice", "asked {other_the} a question"),
        "{other} [smiled|was glad to be asked], and they talked for an hour.",
    ),
    Fear(
        "spiders",
        "they had so many legs",
        ("looked at a spider from far away", "looked at one through a glass", "let a tiny one walk over {his} hand"),
        "It only tickled. The spider [waved|was more afraid than {he} was|went on its way].",
    ),
)


def fear(w: World) -> None:
    """Three days, three steps; the thing is a comfort until it is not needed."""
    introduce_owner(w)
    w.bring("other")
    if w.place.name in WATER:
        dread = w.dice.pick(WATER_FEARS)
    else:
        dread = w.dice.pick(OUTDOOR_FEARS if w.place.outdoors else INDOOR_FEARS)
    w.fields["fear"], w.fields["why"] = dread.name.format_map(w.fields), dread.reason.format_map(w.fields)
    w.say(
        "But {hero} was afraid of one thing: {fear}. You see, {why}.",
        "There was only one thing that {he} was afraid of: {fear}. [You see, {why}|After all, {why}].",
        "Only one thing scared {him}, and that was {fear}, because {why}.",
    )
    w.paragraph()
    arrive(w)
    w.say(
        '"Come on!" said {friend_the}. But {hero} shook {his} head. "I am [scared|afraid]," {he} {whispered}.',
        '{friend_the} was not afraid at all. "I could never do that," said {hero} {sadly}.',
        '{friend_the} asked, "What is wrong?" And {hero} told {him2}.',
    )
    w.maybe(
        65,
        '"Then let us practice," said {friend}. "[A little every day|One step at a time|Just a bit at first]."',
        '"[I used to be afraid too|Everyone is afraid of something]," said {friend}. "Try a little bit each day."',
        '"Nobody has to be brave all at once," said {friend}.',
    )
    remark(w, 20)
    w.paragraph()
    _practice(w, dread)
    w.ending = "brave"
    moral(
        w,
        "courage grows a little every day",
        "you can be brave and afraid at the same time",
        "big things are made of small steps",
        "practice is stronger than fear",
    )
    night(w)


def _practice(w: World, dread: Fear) -> None:
    start = w.dice.below(7)
    days = [GRAMMAR["weekday"][(start + k) % 7] for k in range(3)]
    w.fields["day1"], w.fields["day2"] = days[0], days[1]
    w.recall("day3", days[2])
    for k, step in enumerate(dread.steps, start=1):
        w.fields[f"step{k}"] = step.format_map(w.fields)
    w.say(
        "On {day1}, holding {his} {thing} tight, {hero} {step1}.",
        "On {day1} {he} held on to {his} {thing} and {step1}. {His} [knees|hands] shook.",
        "On {day1} {hero} {step1}, with {his} {thing} in {his} arms.",
    )
    w.say(
        "On {day2} {he} {step2}. [It was a little easier|{His} heart beat fast, but not as fast as before].",
        'On {day2} {he} {step2}. "[Good|Well done|Very good]!" said {friend}.',
        "On {day2} {he} {step2}.",
    )
    w.give("thing", "hero", "friend")
    w.say(
        'And on {day3} {he} said to {friend}, "Hold my {thing}. I do not need it now." {He} took a deep breath and '
        "{step3}.",
        "Then came {day3}. {hero} gave the {thing} to {friend}, took a deep breath, and {step3}.",
        "On {day3} {hero} let {friend} hold the {thing}, and {he} {step3}.",
    )
    w.say(dread.done)
    w.give("thing", "friend", "hero")
    w.paragraph()
    w.say(
        '"You did it!" {cheered} {friend}, and {he2} gave the {thing} back. {hero} was {glad}.',
        '"I did it!" {cheered} {hero}. {friend} gave {him} the {thing} and a big hug.',
        "{friend} gave {him} back the {thing}, and {hero} {smiled}. The fear was gone.",
    )


# --- a race ----------------------------------------------------------------------------------------------------------


def race(w: World) -> None:
    """A boaster and a steady runner; the boaster rests, or falls and is helped."""
    introduce(w)
    w.hold("thing", "elder")
    w.fields["goal"] = w.a_spot("beside", "behind")
    arrive(w)
    w.say(
        '{friend_the} was there, boasting. "I am the fastest of all," {he2} said. "[Nobody can beat me|You are as '
        'slow as a snail, {hero}]!"',
        'Everybody knew that {friend_the} was fast, and nobody knew it better than {friend}. "You will never beat '
        'me," {he2} told {hero}.',
        '{friend_the} ran up and down. "Look how fast I am, {hero}!" {he2} {cried}.',
    )
    w.say(
        '"Let us see," said {hero}. {elder} held up {athing}. "This is the prize," {he4} said.',
        '"Then let us race," said {hero}. {elder} promised the winner {athing}.',
        '"A race!" said {elder}. "The winner gets {athing}."',
    )
    w.say(
        '"You start here and run to the finish, {goal}," said {elder}. "One, two, three, go!"',
        'They were to run once around and finish {goal}. "Ready, set, go!" {cried} {elder}.',
        'The finish was {goal}. "Go!" {cried} {elder}.',
    )
    w.paragraph()
    w.say(
        "{friend} shot off like an arrow. {hero} ran at a steady pace.",
        "In a moment {friend} was far ahead. {hero} did not stop; {he} just kept running.",
        "{friend} ran so fast that the dust flew. {hero} was soon far behind, but {he} did not give up.",
    )
    remark(w, 20)
    if w.chance(55):
        _steady_wins(w)
    else:
        _stop_to_help(w)
    night(w)


def _steady_wins(w: World) -> None:
    w.say(
        '"I have plenty of time," thought {friend}, and {he2} [lay down for a nap|sat down in the shade].',
        "After a while {friend} looked back and laughed. {He2} stopped to [chase {a_bug}|listen to {a_songbird}|show "
        "off].",
        "{friend} was so sure of winning that {he2} stopped to [pick {flower}|look at the clouds|tell {a_bird} all "
        "about it].",
    )
    w.maybe(
        70,
        "Step by step {hero} came nearer, and step by step {he} went past.",
        "{hero} ran on and on, past {friend}, who did not even notice.",
        "{hero} did not stop for anything.",
    )
    w.paragraph()
    w.recall("finish", w.fields["goal"])
    w.say(
        "When {friend} looked up, {hero} was already {finish}. {hero} had won!",
        "Then {friend} ran as fast as {he2} could, but it was too late. There stood {hero}, {finish}, the winner!",
        "And who was first to stand {finish}? It was {hero}!",
    )
    w.give("thing", "elder", "hero")
    w.say(
        '{elder} gave the {thing} to {hero}. "{praise}," {he4} said.',
        'So the {thing} went to {hero}. "I should not have boasted," said {friend}, and they shook hands.',
        '"You won it fairly," said {elder}, and {he4} gave {hero} the {thing}.',
    )
    w.ending = "won"
    moral(w, "slow and steady gets there", "boasting does not make you faster", "you should never stop before the end")


def _stop_to_help(w: World) -> None:
    w.say(
        "Then {friend} [tripped over a root|slipped on a wet stone|fell into a puddle] and hurt {his2} knee.",
        "{friend} did not look where {he2} was going. Bump! There {he2} lay, holding {his2} foot.",
        "Suddenly {friend} stumbled and fell.",
    )
    w.say(
        '{hero} could have run past and won. But {he} stopped. "[Lean on me|I will help you up]," {he} said.',
        '{hero} saw the finish. But {he} turned around and said, "Give me your hand."',
        '"Are you hurt?" asked {hero}, and {he} forgot all about the race.',
    )
    w.paragraph()
    w.recall("finish", w.fields["goal"])
    w.say(
        "Arm in arm they walked on, and they got there, {finish}, at the very same moment.",
        "Slowly, side by side, they went on until they stood {finish}.",
        "So both of them were last, and both of them were first, when they stood {finish}.",
    )
    w.give("thing", "elder", "friend")
    w.give("thing", "friend", "hero")
    w.say(
        '{elder} gave the {thing} to {friend}, but {friend} put it into {hero}\'s hands. "You are the real winner," '
        "{he2} said.",
        '{friend} took the {thing} from {elder} and gave it to {hero}. "I was fast," {he2} said, "but you were kind."',
    )
    w.ending = "tied"
    moral(
        w,
        "helping is better than winning",
        "a good heart wins more than fast feet",
        "a friend is worth more than a prize",
    )


# --- something built -------------------------------------------------------------------------------------------------


def build(w: World) -> None:
    """Two parts are fetched from where the elder says; the thing fails without the third, and holds with it."""
    plan = next(plan for plan in BUILDS if plan.noun == w.noun)
    introduce(w)
    w.fields["thing"] = plan.noun
    for k, part in enumerate(plan.parts, start=1):
        w.hold(f"part{k}", "elder")
        w.put(f"part{k}", "elder", w.a_spot())
        w.fields[f"part{k}"], w.fields[f"part{k}_spot_cap"] = part, _capital(w.lies[f"part{k}"])
        w.fields[f"the_part{k}"] = "the " + part.split(" ", 1)[1]
    w.fields["failure"], w.fields["success"] = plan.failure, plan.success.format_map(w.fields)
    arrive(w)
    meet(w)
    w.say(
        '"Let us [build|make] {a_thing}!" said {hero}. "[Good idea|Yes, let us]!" said {friend}.',
        '"I am bored," said {friend}. "Then let us make {a_thing}," said {hero}.',
        "They wanted to build {a_thing}.",
    )
    w.say(
        '"You need {part1} and {part2}," {elder} told them. "Look for {the_part1} {part1_spot}, and for {the_part2} '
        '{part2_spot}."',
        '"You will find {part1} {part1_spot}," said {elder}, "and {part2} {part2_spot}."',
        "They asked {elder} for help. {elder} told them that there was {part1} {part1_spot} and {part2} {part2_spot}."
        if _is_single(plan.parts[0])
        else '"There are {part1} {part1_spot}," said {elder}, "and you can have {part2}. Look {part2_spot}."',
    )
    remark(w, 15)
    w.paragraph()
    w.find("part1", "hero")
    w.find("part2", "friend")
    w.say(
        "{hero} looked {part1_found} and got {the_part1}. {friend} looked {part2_found} and got {the_part2}.",
        "They looked {part1_found}, and {hero} got {the_part1}. They looked {part2_found}, and {friend} got "
        "{the_part2}.",
        "So {hero} looked {part1_found}, and {friend} looked {part2_found}, and everything was there.",
    )
    w.say(
        "They [cut|tied|worked] and measured until the {thing} was done. But when they tried it, {failure}.",
        "They were in a hurry, and they did not stop to think. At the first try {failure}.",
        "Soon it was done. But {failure}!",
    )
    w.maybe(
        60,
        '"{alas}!" said {friend}. "[It will never work|Let us give up]."',
        "{friend} was {cross}, and {hero} was {sad}.",
    )
    w.paragraph()
    _try_again(w)
    w.ending = "built"
    moral(
        w,
        "a second try is often the better one",
        "good work takes time",
        "you learn more from a mistake than from luck",
        "it is too early to give up after one try",
    )
    night(w)


def _try_again(w: World) -> None:
    w.find("part3", "hero")
    w.say(
        '"You forgot something," said {elder}. "You need {part3} too." {hero} found {the_part3} {part3_spot}.',
        '{hero} looked at it from all sides. "I know!" {he} said. "We need {part3}." And {he} found {the_part3} '
        "{part3_spot}.",
        "Then {hero} had an idea. {part3_spot_cap} there was {part3}, and that was just what they needed."
        if _is_single(w.fields["part3"])
        else '"What about {part3}?" said {hero}. {He} had seen some {part3_spot}.',
    )
    w.say(
        "This time they worked {carefully}. And look: {success}!",
        "They began again, and this time they did not hurry. When they tried it now, {success}.",
        "They tried once more, and {success}!",
    )
    w.maybe(
        65,
        '"{wow}!" {cheered} {hero} and {friend}.',
        '"{praise}, {hero}," said {elder}.',
        "{hero} and {friend} shook hands [twice|three times].",
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _is_single(part: str) -> bool:
    """Whether "there was" goes before it, and not "there were"."""
    return part.startswith(("a ", "an ", "some "))


# --- something planted -----------------------------------------------------------------------------------------------


def plant(w: World) -> None:
    """A seed, a pot in a spot, weeks of waiting; watered it grows, forgotten it droops first."""
    introduce(w)
    w.fields["thing"] = w.noun
    w.fields["weeks"] = number(2 + w.dice.below(4))
    w.hold("pot", "hero")
    arrive(w)
    w.say(
        '{elder} gave {him} a tiny [brown|black|striped] seed. "There is {a_thing} in it," said {elder}.',
        '{He} found a tiny seed in {his} pocket. "That will be {a_thing} one day," said {elder}, "if you take care '
        'of it."',
        '"This seed wants to be {a_thing}," said {elder}, and {he4} gave it to {hero}.',
    )
    w.put("pot", "hero", w.a_spot("on", "beside", "behind"))
    w.say(
        "{hero} filled a [clay|blue|chipped|round] pot with earth, pushed the seed in, and put the pot {pot_spot}.",
        "So {he} planted the seed in a [little|red|cracked|wooden] pot, gave it some water, and set the pot "
        "{pot_spot}.",
        "{hero} put the seed into a pot, and the pot {pot_spot}.",
    )
    remark(w, 30)
    w.paragraph()
    w.maybe(
        50,
        "The next day {he} ran to look. Nothing. The day after, still nothing.",
        "{He} looked every morning, but there was only earth.",
    )
    w.say(
        '"Maybe it is broken," said {friend_the}. "[Dig it up and see|Throw it away]." "[No|Let it sleep]," said '
        '{elder}. "[A seed needs time|Wait and see]."',
        '"When will it come up?" asked {hero}. "[When it is ready|In its own good time]," said {elder}.',
        "{friend_the} laughed at the empty pot. But {elder} said that a seed needs time.",
    )
    w.paragraph()
    w.find("pot", "hero")
    if w.chance(60):
        _water_it(w)
    else:
        _forget_it(w)
    w.maybe(
        60,
        '{hero} danced around the pot. "{wow}! [It was worth the wait|I grew it myself]!" {he} {cried}.',
        '"You see," said {elder}, "[you took good care of it|it only needed time]." {hero} was {glad}.',
        "{hero} showed it to {friend_the} and to everybody who came by.",
    )
    moral(
        w,
        "good things take time",
        "small things grow when you care for them",
        "waiting is easier when you do something useful",
        "a little care every day does wonders",
    )
    night(w)


def _water_it(w: World) -> None:
    w.say(
        "So {hero} waited, and {he} gave it water every day, for {weeks} weeks.",
        "{hero} did not give up. For {weeks} weeks {he} watered it and even sang to it, a song about {tale}.",
        "For {weeks} weeks {hero} watered it every day.",
    )
    w.say(
        "Then one morning {he} looked {pot_found}, and there was a green [shoot|tip]! It grew and grew, until it was "
        "a real {thing}.",
        "And then, one {sky} day, there was a tiny green leaf. Soon {a_thing} stood {pot_found}, as "
        "[tall|fine|proud] as a king.",
        "One day something green peeked out of the pot {pot_found}. It grew and grew, and at last it was {a_thing}.",
    )
    w.ending = "grew"


def _forget_it(w: World) -> None:
    w.say(
        "A green shoot came up. But then {hero} was busy {game}, and {he} forgot to water it for {weeks} days.",
        "After a while a little leaf came up. But {hero} went off with {friend_the}, {game}, and for {weeks} days "
        "nobody watered it.",
    )
    w.say(
        "When {he} looked {pot_found} again, the leaves [hung down|were brown and limp].",
        "At last {he} remembered. {He} ran to look {pot_found}. The poor little plant [drooped|hung its head].",
    )
    w.say(
        '"I am sorry, little plant," said {hero}. From then on {he} brought it water every morning, and in the end '
        "it was a fine {thing}.",
        "{hero} brought water at once. {He} never forgot it again, and by and by it grew into a fine {thing}.",
    )
    w.ending = "revived"
