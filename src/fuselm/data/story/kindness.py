"""Plots about kindness: sharing that is returned, a sick friend, a newcomer, a rescue, the smallest one who helps.

Each plot takes a world and tells it to its end. Who is helped, and by whom, follows from what was done before.
"""

from __future__ import annotations

from typing import NamedTuple

from fuselm.data.story.beats import arrive, introduce, introduce_owner, moral, night, remark
from fuselm.data.story.words import phrases
from fuselm.data.story.world import World, number

# --- sharing ---------------------------------------------------------------------------------------------------------


class Mishap(NamedTuple):
    """How the thing gets out of reach, and who can get it back and how."""

    helpers: tuple[str, ...]
    accidents: tuple[str, ...]
    trying: tuple[str, ...]
    rescues: tuple[str, ...]


MISHAPS = (
    Mishap(
        phrases("duck, otter, frog, beaver, water rat, muskrat, turtle"),
        (
            "the {thing} slipped from {his} hands and fell into the deep water",
            "{he} stumbled on the little bridge, and the {thing} went splash into the stream",
            "the {thing} rolled down the bank and sank in the pond",
        ),
        ("{He} reached out with a stick, but the water was too deep.", "{He} could not swim that far."),
        (
            "dived down to the bottom and came up with the {thing}",
            "swam out and brought the {thing} back",
            "jumped in without a word and fetched the {thing}",
        ),
    ),
    Mishap(
        phrases("squirrel, crow, jay, raven, sparrow, woodpecker, magpie, marten"),
        (
            "a gust of wind snatched the {thing} and left it high up in {a_tree} tree",
            "the {thing} flew out of {his} hands and landed at the very top of {a_tree} tree",
            "{he} threw the {thing} into the air for fun, and it got stuck in {a_tree} tree",
        ),
        (
            "{He} jumped and jumped, but the branch was much too high.",
            "{He} shook the tree, but the {thing} did not move.",
        ),
        (
            "was up there in a moment and brought the {thing} down",
            "reached the top in no time and dropped the {thing} right into {his} arms",
            "got hold of the {thing} and carried it down to {him}",
        ),
    ),
    Mishap(
        phrases("mole, mouse, vole, weasel, hedgehog, shrew, dormouse, chipmunk"),
        (
            "the {thing} slipped into a dark hole between the stones",
            "{he} tripped, and the {thing} fell into a deep, narrow hole",
            "the {thing} dropped through a crack in the ground",
        ),
        (
            "{He} put {his} whole arm in, but it was too deep.",
            "{He} lay down and reached for it, but it was too far away.",
        ),
        (
            "vanished into the dark and came out again, dusty but smiling, with the {thing}",
            "crawled down and pushed the {thing} up again",
            "slipped in and was soon back with the {thing}",
        ),
    ),
)


def share(w: World) -> None:
    """A hungry animal asks for a bite. Who shares is helped when the thing is out of reach; who does not, must ask."""
    introduce_owner(w)
    mishap = w.dice.pick(MISHAPS)
    w.fields["helper"] = w.dice.pick(mishap.helpers)
    w.fields["bite"] = w.fields["snack"]
    w.paragraph()
    arrive(w)
    w.say(
        "{He} carried the {thing} under one arm and {bite} in a paper bag.",
        "{elder} had given {him} {bite} for the way.",
        "In {his} bag {he} had {bite} for later.",
    )
    remark(w, 20)
    w.say(
        'Beside the path sat {a_helper}. "[I am so hungry|I have not eaten all day]," it said. "[Could I have a '
        'bite|Will you share with me]?"',
        'A thin little {helper} looked up at {him}. "Please," it said, "could I have some of your food?"',
        'There {he} met {a_helper}. "[That smells good|You have something to eat]," it said. "Will you give me some?"',
    )
    if w.chance(65):
        _share_and_be_helped(w, mishap)
    else:
        _refuse_and_be_sorry(w, mishap)
    night(w)


def _lose_reach(w: World, mishap: Mishap) -> None:
    w.paragraph()
    w.advance()
    accident = w.dice.pick(mishap.accidents)
    w.say(f"{{later}}, {accident}.", f"But on the way home, {accident}.")
    w.maybe(60, '"{alas}, my {thing}!" {cried} {hero}.', '"{alas}!" {cried} {hero}. "How will I get it back?"')
    w.maybe(60, *mishap.trying)


def _share_and_be_helped(w: World, mishap: Mishap) -> None:
    w.say(
        '"Of course," said {hero}, and {he} gave the {helper} half of what {he} had.',
        '{hero} broke it in two. "[Here|Come]," {he} said {softly}. "One half for you and one half for me."',
        "{hero} was hungry too, but {he} sat down, and they shared it to the last crumb.",
        '"Then we will share," said {hero}, and so they did.',
    )
    w.maybe(
        45,
        '"[Thank you|You are kind]," said the {helper}. "I will not forget it."',
        "The {helper} ate it up and bowed.",
    )
    _lose_reach(w, mishap)
    w.say(
        'Then {he} heard a small voice. "You shared with me," said the {helper}. "Now I will help you."',
        'Who should come along then but the {helper}! "One good turn deserves another," it said.',
        '"Let me," said somebody. It was the {helper}.',
    )
    w.say(f"The {{helper}} {w.dice.pick(mishap.rescues)}.")
    w.maybe(
        65,
        '"Thank you, dear {helper}!" said {hero}. From then on they were friends.',
        "{hero} was {glad}, and the {helper} was proud.",
        "The next day {hero} came back, and they shared {snack}.",
    )
    w.ending = "helped"
    moral(w, "kindness comes back", "whoever shares is never alone", "a small gift can bring a great help")


def _refuse_and_be_sorry(w: World, mishap: Mishap) -> None:
    w.say(
        '"No," said {hero}. "It is [mine|all for me]." And {he} ate it all {himself}.',
        '"I am hungry too," said {hero}, and {he} [walked on|turned away] and gave the {helper} nothing.',
        "But {hero} did not want to share. {He} ate it up to the last crumb, while the {helper} watched.",
    )
    _lose_reach(w, mishap)
    w.say(
        "The {helper} sat there and watched. {hero} turned red.",
        "Then {he} saw the {helper}, and {he} remembered.",
        '"I could help you," said the {helper}, "but you did not share with me."',
    )
    w.say(
        '"I am sorry that I did not share," {he} said. "[That was not kind|I was selfish]. Tomorrow I will bring you '
        '{snack}."',
        '"I should have shared with you," said {hero} {sadly}. "I am sorry."',
        '"You are right to be angry," said {hero}. "Please forgive me."',
    )
    rescue = w.dice.pick(mishap.rescues)
    w.say(
        f'"[I believe you|Then let us be friends]," said the {{helper}}. It {rescue}.',
        f"The {{helper}} thought for a moment. Then it {rescue}.",
    )
    w.say(
        "The next day {hero} came back with {snack} and gave the {helper} the bigger half.",
        "{hero} kept {his} word: from then on {he} shared every lunch with the {helper}.",
        "After that {hero} never ate alone when somebody was hungry.",
    )
    w.ending = "forgiven"
    moral(w, "it is never too late to be kind", "one should share before one needs help", "a kind word opens a door")


# --- a sick friend ---------------------------------------------------------------------------------------------------


def sick(w: World) -> None:
    """A friend is ill; the hero visits with food and the thing; after the days named the friend is well."""
    introduce_owner(w)
    w.paragraph()
    days = 2 + w.dice.below(4)
    w.fields["days"], w.fields["ordinal"] = number(days), ("third", "fourth", "fifth", "sixth")[days - 2]
    arrive(w)
    w.say(
        "{He} waited for {his} friend {friend_the}, but {friend} did not come.",
        "{He} wanted to play with {friend_the}, but {friend} was not there.",
        "Where was {his} friend {friend_the}?",
    )
    w.say(
        '"{friend} is in bed with {illness1}," {elder} told {him}.',
        '"Have you not heard?" said {elder}. "{friend} has {illness1}."',
        "Then {he} heard that {friend} had {illness1} and had to stay in bed.",
    )
    w.maybe(
        45,
        '"Poor {friend}!" said {hero}. "I will [visit {him2}|cheer {him2} up|go and see {him2}]."',
        "{hero} thought about how [dull|lonely|sad] it is to be sick.",
    )
    w.paragraph()
    w.say(
        "So {he} went to {friend}'s bedside with {remedy} and {his} own {fine}.",
        "{hero} took {remedy}, put {his} {thing} under one arm, and went to see {friend}.",
        "{elder} gave {him} {remedy}, and {hero} brought {his} {thing} too.",
    )
    w.give("thing", "hero", "friend")
    w.say(
        '"You may keep my {thing} until you are well," {he} said.',
        '"Here is my {thing}," said {hero}. "It will keep you company."',
        '"I lend you my {thing}," said {hero}, "because [you need it more|it always cheers me up]."',
    )
    w.say(
        "Then {he} told {friend} a story about {tale}, and {friend} laughed.",
        "{friend} [sneezed|sighed] and smiled. {hero} sat there and sang a song about {tale}.",
        "They spent the {time} telling each other about {tale}.",
        "To make {friend} laugh, {hero} drew a picture of {tale}.",
    )
    _get_well(w)
    moral(
        w,
        "a visit is the best medicine",
        "a friend in need is glad of a friend",
        "good friends come when you need them",
        "company makes every sickness shorter",
    )
    night(w)


def _get_well(w: World) -> None:
    w.paragraph()
    w.say(
        "{hero} came every day for {days} days. On the {ordinal} day {friend} [jumped|hopped|climbed] out of bed.",
        "For {days} days {friend} had to rest, and each day {hero} came. On the {ordinal} day {friend} was well.",
        "{days} days went by, and on the {ordinal} day {friend} could get up again.",
    )
    w.give("thing", "friend", "hero")
    w.say(
        '"Here is your {thing}," said {friend}. "[It was a great comfort|It made me well]. Thank you, {hero}."',
        "{friend} gave the {thing} back to {hero} and hugged {him}.",
        "The first thing that {friend} did was to bring the {thing} back to {hero}.",
    )
    if w.chance(40):
        w.ending = "returned"
        w.say(
            "Some weeks later it was {hero} who had {illness1}. And who came to visit, with {remedy}? {friend}, of "
            "course.",
            "And when {hero} had {illness1} that winter, {friend} came every single day.",
        )
    else:
        w.ending = "well"
        w.say("Then {hero} and {friend} spent the whole day {game}.", "By noon {friend} and {hero} were {game} again.")


# --- a newcomer ------------------------------------------------------------------------------------------------------


def newcomer(w: World) -> None:
    """Somebody new sits alone; the hero invites them, and it turns out that the newcomer can do something."""
    introduce_owner(w)
    w.paragraph()
    arrive(w)
    w.bring("other")
    w.fields["seat"] = w.a_spot("beside", "behind")
    w.say(
        "Somebody new was there. It was {friend_the}, who had just moved to town.",
        "{friend_the} had moved in next door, and {he2} did not know anyone yet.",
        "That week somebody new had come: {friend_the}, from far away.",
        "{friend_the} was new and had no friends yet.",
    )
    w.say(
        "{friend} stood {seat}, all alone, and nobody talked to {him2}.",
        "{He2} waited {seat} and looked at {his2} feet.",
        "While the others played, {friend} sat {seat} and said nothing.",
    )
    remark(w, 25)
    w.say(
        '"[Leave {him2} be|Do not bother]," said {other_the}. "We do not know {him2}." But {hero} shook {his} head.',
        "{other_the} only [shrugged|looked away], but {hero} felt {sad} for {him2}.",
        '"{He2} never says a word," {whispered} {other_the}. "Maybe {he2} is shy," said {hero}.',
    )
    w.paragraph()
    w.say(
        'So {he} went over. "[Hello|Hi there|Good day], I am {hero}," {he} said. "Would you like to {use} my {thing} '
        'with me?"',
        '{hero} walked up to {him2} and held out the {thing}. "[Come and join us|You can have a turn]," {he} said.',
        '{He} took the {thing} and sat down next to {friend}. "Do you want to try?" {he} asked.',
    )
    w.maybe(
        70,
        "{friend} looked up, and slowly {he2} began to smile.",
        '"[May I|Really|Me]?" said {friend}. {His2} face lit up.',
        '"Thank you," {friend} {whispered}. "My name is {friend}."',
    )
    w.say(
        "They {shared}. Then {friend} showed them how to {skill}. Nobody else could do that!",
        'It turned out that {friend} knew how to {skill}. "{wow}!" {cheered} {other}. "Can you teach us?"',
        'Soon they were laughing. "Do you know how to {skill}?" asked {friend}. They did not, so {he2} taught them.',
    )
    w.paragraph()
    w.say(
        "By evening {hero}, {friend} and {other} were friends.",
        'When it was time to go, {other} said, "Will you come again tomorrow, {friend}?" {hero} {smiled}.',
        "After that nobody ever saw {friend} {seat} alone again, for {hero} always kept a place for {him2}.",
    )
    w.ending = "friends"
    moral(
        w,
        "a stranger is a friend you have not met yet",
        "one kind word can end a lonely day",
        "everybody has something to teach",
        "it takes only a hello to make a friend",
    )
    night(w)


# --- a rescue --------------------------------------------------------------------------------------------------------

BABIES = phrases("""
kitten, puppy, duckling, chick, lamb, piglet, owlet, fawn, bunny, gosling, cygnet, baby hedgehog, baby squirrel
fox cub, bear cub, baby goat, foal, baby raccoon, baby penguin
""")


def rescue(w: World) -> None:
    """A baby animal is stuck; the tool that frees it is fetched from where it is kept."""
    introduce(w)
    w.fields["baby"] = w.dice.pick(BABIES)
    stuck, kept = w.a_spot("under", "behind"), w.a_spot("beside", "on", "behind", "under")
    w.fields["stuck"], w.fields["stuck_cap"] = stuck, stuck[0].upper() + stuck[1:]
    w.hold("thing", "elder")
    w.put("thing", "elder", kept)
    w.say(
        '{elder} kept {athing} {thing_spot} {in_place}. "[You never know|One day we will need it]," {he4} always said.',
        "{in_place}, {thing_spot}, {elder} kept {athing}.",
        '{elder} had {athing}. "It belongs {thing_spot}," {he4} liked to say, "so that we can always find it."',
    )
    w.paragraph()
    arrive(w)
    remark(w, 25)
    w.say(
        "Suddenly {he} heard a [tiny cry|sad little noise|whimper]. {A_baby} was stuck {stuck}!",
        '"[Help|Eek|Oh, oh]!" cried a thin voice. {stuck_cap}, {a_baby} could move neither forward nor back.',
        "What was that sound? {hero} listened. {stuck_cap} there was {a_baby}, and it could not get out.",
    )
    w.maybe(
        60,
        "{hero} pulled [gently|and pulled], but the little {baby} was stuck too tight.",
        "{He} reached as far as {he} could. It was no use.",
        '"Do not be afraid," said {hero}, but {he} could not reach the {baby}.',
    )
    w.say(
        '"I will get help," {he} promised. {He} {hurried} off and met {friend_the}.',
        'Just then {friend_the} came running. "What can we do?" asked {friend}.',
        "{He} called for help, and {friend_the} came.",
    )
    w.paragraph()
    _set_free(w)
    w.ending = "freed"
    moral(
        w,
        "even a great helper may need help",
        "a thing in its place can save the day",
        "two can do what one cannot",
        "no one is too small to be saved",
    )


def _set_free(w: World) -> None:
    w.find("thing", "hero")
    w.say(
        '"We need the {thing}!" said {hero}. "It is {thing_found}." {friend} {hurried} off and brought it.',
        "{hero} thought of the {thing}. It was {thing_found}, just as {elder} had said, and {he} {hurried} back with "
        "it.",
        "{hero} knew what to do. {He} got the {thing}, which was {thing_found}, as always.",
    )
    w.say(
        "With the help of the {thing}, and with {friend} holding {his} legs, {hero} set the {baby} free.",
        "{friend} held one end of the {thing} and {hero} held the other. One, two, three, and the {baby} was free!",
        "{hero} [pushed|lifted] with the {thing} and {friend} pulled. Pop! Out came the {baby}.",
    )
    w.maybe(
        70,
        "The {baby} shook itself and licked {hero}'s hand.",
        "The mother of the {baby} came, and she [was so {happy}|thanked them with her eyes].",
        "The {baby} ran three times around {hero}, [squeaking|chirping|tumbling] with joy.",
    )
    w.put("thing", "hero", w.fields["thing_spot"])
    w.say(
        '"{praise}," said {elder}. Then {hero} put the {thing} back {thing_spot}.',
        "Afterward {hero} put the {thing} back where it belonged, {thing_spot}.",
        "And {hero} did not forget to put the {thing} back {thing_spot}.",
    )


# --- the smallest one ------------------------------------------------------------------------------------------------


def small(w: World) -> None:
    """The hero is laughed at for being small; then the friend's thing is where only somebody small can go."""
    w.hold("thing", "friend")
    w.bring("other")
    introduce(w)
    w.say(
        "{hero} was [very small|the smallest of them all|no bigger than {a_round_thing}].",
        "There was only one trouble: {he} was so small that [nobody noticed {him}|they called {him} Thimble|hats "
        "fell over {his} eyes].",
        "{He} was smaller than all the others, and {he} did not like it.",
    )
    w.paragraph()
    arrive(w)
    w.say(
        "{friend_the} was there with {athing}.",
        "{friend_the} was {using} {athing} there.",
        "There {friend_the} was showing everyone {athing}.",
    )
    w.say(
        '"May I have a turn?" asked {hero}. "You are too small," said {friend}. "[Go and play with the {bug}s|Come '
        'back when you have grown]."',
        '"[Look, here comes the little one|Watch out, do not step on {hero}]!" said {friend}, and {other_the} laughed.',
        '"This is not for small ones like you," {friend} told {hero}.',
    )
    w.maybe(60, "{hero} felt {sad}.", "{hero} [swallowed hard|said nothing|looked at {his} toes].")
    remark(w, 25)
    w.paragraph()
    _squeeze_in(w)
    w.give("thing", "hero", "friend")
    w.paragraph()
    w.say(
        '"I am sorry that I was so rude," said {friend}. "You saved my {thing}, {hero}. Do you want a turn?"',
        '{friend} turned red. "It is good that you are small, {hero}," {he2} said. "[Please take the first turn|Let '
        'us share it]."',
        '"Thank you, {hero}," said {friend}. "I will never laugh at you again."',
    )
    w.maybe(
        60, "So they {shared}.", "And after that {hero} always got the first turn.", "{hero} smiled from ear to ear."
    )
    w.ending = "respected"
    moral(
        w,
        "being small can be a big help",
        "everybody is the right size for something",
        "it is wrong to laugh at others",
        "great help can come in a small size",
    )
    night(w)


def _squeeze_in(w: World) -> None:
    w.put("thing", "friend", w.a_spot("behind", "beside", "under"))
    w.say(
        "Then it happened: the {thing} slipped and fell into a narrow crack {thing_spot}.",
        "{sound}! The {thing} slid away and got stuck in a tiny gap {thing_spot}.",
        "But then {friend} dropped the {thing}, and it disappeared into a small hole {thing_spot}.",
    )
    w.say(
        "{friend} pushed and pulled, but {his2} [arms were too thick|hands were too big].",
        '{friend} tried, and {other_the} tried. "[We are too big|We cannot reach it]!" said {friend} {sadly}.',
        "Nobody could reach it. {friend} was close to tears.",
    )
    w.say(
        '"Let me try," said {hero}. "I am small enough."',
        '{hero} stepped forward. "I can fit in there," {he} said {softly}.',
        '"I can do it," said {hero}.',
    )
    w.find("thing", "hero")
    w.say(
        "{He} wriggled in {thing_found}, and out {he} came with the {thing}.",
        "Nobody else could have squeezed in {thing_found}, but {hero} could. A moment later {he} held up the {thing}.",
        "{He} made {himself} as thin as a ribbon, reached in {thing_found}, and got the {thing}.",
    )
