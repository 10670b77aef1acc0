"""Plots about being someone others can count on: a promise, an errand, a message, a broken vase, a false alarm.

Each plot takes a world and tells it to its end. The ending follows from what the hero did at the turn of the story.
"""

from __future__ import annotations

from fuselm.data.story.beats import arrive, introduce, introduce_owner, meal, moral, night, remark
from fuselm.data.story.things import MESSAGES, SHOPPING, Thing
from fuselm.data.story.words import phrases
from fuselm.data.story.world import World

# --- a promise -------------------------------------------------------------------------------------------------------


def promise(w: World) -> None:
    """A borrowed thing is to be back in time: the promise is kept, or broken and made good."""
    introduce(w)
    w.hold("thing", "elder")
    w.fields["by"] = w.dice.pick(("before supper", "by four o'clock", "before dark", "by five o'clock", "by teatime"))
    w.start_in_the_morning()
    w.say(
        "One {sky} morning {he} asked {elder} for {athing} to take {to_place}.",
        '{elder} had {athing}. "May I take it {to_place}?" asked {hero} one {sky} morning.',
        "One {sky} morning {hero} wanted to borrow {elder}'s {fine} and take it {to_place}.",
    )
    w.give("thing", "elder", "hero")
    w.say(
        '"Yes," said {elder}, "but promise to bring it back {by}." "I promise," said {hero}.',
        '"If you promise to bring it back {by}," said {elder}. {hero} [nodded|put a hand on {his} heart]. "I promise!"',
        '"Only if I have it back {by}," said {elder}. {hero} gave {his} word.',
    )
    w.paragraph()
    w.maybe(
        60,
        "All morning {he} {used} the {thing} {in_place}.",
        "{hero} {strolled} {to_place} with the {thing} and had {a_nice} time.",
    )
    remark(w, 30)
    meal(w, 25)
    while w.clock < 2:  # the afternoon
        w.advance()
    w.say(
        '{later}, {friend_the} came. "Come with me to {spree1}!" said {friend}.',
        '{later}, along came {friend_the}. "I am going to {spree1}," {he2} said. "Are you coming?"',
        '{later}, {friend_the} ran by. "Hurry, {hero}, or we will miss {spree1}!"',
    )
    if w.chance(50):
        _keep_the_promise(w)
    else:
        _break_the_promise(w)


def _keep_the_promise(w: World) -> None:
    w.say(
        '{hero} [wanted to go very much|looked at the sky]. But it was getting late. "I cannot," {he} said. "I made '
        'a promise."',
        '"I would love to," said {hero}, "but I promised to bring the {thing} back {by}."',
        'It was hard to say no, but {hero} said, "Not today. First I must take the {thing} back."',
    )
    w.paragraph()
    w.give("thing", "hero", "elder")
    w.say(
        "{He} {hurried} home and gave the {thing} to {elder}, [just in time|with a minute to spare].",
        "So {he} went home at once, and {elder} had the {thing} back {by}.",
        "{elder} was [surprised|pleased] when {hero} came home and put the {thing} into {his4} hands.",
    )
    w.say(
        '"You kept your promise," said {elder}. "[I knew that I could trust you|Tomorrow you may take it again]."',
        '{elder} {smiled}. "Because you kept your word," {he4} said, "you may borrow it whenever you like."',
    )
    w.maybe(
        60,
        "The next day {hero} and {friend} went to {spree1} together, and they took the {thing} along.",
        "{hero} was {glad}. The next day {friend} came again, and this time {hero} could go along.",
    )
    w.ending = "kept"
    moral(
        w, "a promise is a promise", "whoever keeps a promise is trusted", "it feels good to keep your word", elder=True
    )
    night(w)


def _break_the_promise(w: World) -> None:
    w.put("thing", "hero", w.a_spot())
    w.say(
        '"[I will not be long|Just for a minute]," said {hero}. {He} left the {thing} {thing_spot} and went along.',
        "{hero} forgot {his} promise. {He} put the {thing} {thing_spot} and ran after {friend}.",
        "There was still time, {hero} thought. {He} laid the {thing} {thing_spot} and went with {friend}.",
    )
    w.maybe(60, "They stayed much too long.", "It was [fun|great fun], and nobody thought of the time.")
    w.paragraph()
    w.say(
        'It was dark when {hero} came home. {elder} was waiting. "Where is my {thing}?" {he4} asked.',
        'When {hero} came home, {elder} looked {sad}. "You promised," {he4} said. "I needed my {thing}."',
        'At home {elder} only asked one question: "Where is my {thing}?"',
    )
    w.find("thing", "hero")
    w.give("thing", "hero", "elder")
    w.say(
        '{hero} [hung|lowered] {his} head. "I left it {thing_found}," {he} said. "I forgot. I am sorry."',
        'Tears came to {hero}\'s eyes. "It is {thing_found}," {he} said. "I broke my promise, and I am sorry."',
        '"It is still {thing_found}," said {hero}, and {his} voice was very small.',
    )
    w.say(
        "They went to get the {thing} together. For a week {hero} was not allowed to borrow anything.",
        "Early the next morning {he} {hurried} to get it and gave it back. But for a while {elder} lent {him} nothing.",
    )
    w.maybe(
        70,
        "After that {hero} kept every promise, big or small, and [one day|at last] {elder} lent {him} the {thing} "
        "again.",
        "It took time, but {hero} worked hard until {elder} trusted {him} again.",
    )
    w.ending = "broken"
    moral(
        w,
        "trust is quickly lost and slowly found",
        "a broken promise makes two people sad",
        "it is best to keep your word",
    )


# --- an errand -------------------------------------------------------------------------------------------------------


def errand(w: World) -> None:
    """Three things to fetch, told once; the hero brings all three, or goes back for the one that was forgotten."""
    introduce(w)
    at, step = SHOPPING.index(w.noun), 1 + w.dice.below(11)
    goods = [w.noun, SHOPPING[(at + step) % len(SHOPPING)], SHOPPING[(at + 2 * step) % len(SHOPPING)]]
    turn = w.dice.below(3)
    w.fields["buy1"], w.fields["buy2"], w.fields["buy3"] = goods[turn:] + goods[:turn]
    w.say(
        'One {sky} {time} {elder} said, "Please go {to_place}, {hero}, and bring me {buy1}, {buy2} and {buy3}."',
        '"{hero}, will you run {to_place} for me?" {elder} asked one {sky} {time}. "I need {buy1}, {buy2} and {buy3}."',
        "{elder} [wanted to cook|was busy|had guests] and needed {buy1}, {buy2} and {buy3}. So one {sky} {time} "
        "{he4} sent {hero} {to_place}.",
    )
    w.say(
        "{hero} counted the three things on {his} fingers and set off.",
        '"That is easy to remember," said {hero}. {He} took [the big basket|a bag|a basket] and went.',
        "{hero} said it over and over, like a rhyme, all the way.",
    )
    remark(w, 40)
    w.paragraph()
    w.say(
        "There were so many people! First {he} bought {buy1} from {seller}.",
        "{He} went from one stall to the next. First {he} got {buy1}.",
        '"What can I do for you?" asked {seller}. "I would like {buy1}," said {hero}.',
        "At the first stall {he} found {buy1}.",
    )
    if w.chance(50):
        w.ending = "remembered"
        w.say(
            "Then {he} got {buy2}, and last of all {buy3}.",
            "At the next stall {he} found {buy2}, and right behind it {buy3}.",
            "{He} asked {seller} for {buy2} and {buy3}, and that was all.",
        )
        remark(w, 40)
    else:
        w.ending = "went back"
        _forget_the_third(w)
    w.paragraph()
    for k in (1, 2, 3):
        w.recall(f"got{k}", w.fields[f"buy{k}"])
    w.say(
        "At home {elder} unpacked it all. There was {got1}, there was {got2}, and there was {got3}.",
        '"Let us see," said {elder}. "You have {got1}, {got2} and {got3}. Nothing is missing."',
    )
    w.maybe(
        60,
        '"{praise}, {hero}," said {elder}.',
        "As a reward {hero} got [a penny|a kiss|the first slice of cake|a ride on {his4} shoulders].",
        "{hero} was {tired}, but {glad}.",
    )
    moral(
        w,
        "a good list can be carried in the head",
        "it helps to count before you go home",
        "saying a thing twice helps you to remember it",
        "it is better to go back than to come home without",
    )
    night(w)


def _forget_the_third(w: World) -> None:
    w.say("Then {he} got {buy2}.", "After that {he} asked for {buy2}.")
    w.say(
        "{He} was halfway home when {he} counted again. One, two... what was the third thing?",
        "But then {friend_the} came by and talked about {tale}, and {hero} forgot the third thing.",
        "But the third thing had slipped {his} mind.",
    )
    w.recall("forgotten", w.fields["buy3"])
    w.say(
        '"Now I remember," {he} said at last. "It was {forgotten}." So {he} {hurried} back and got it.',
        "{He} stood still and thought until it came to {him}: {forgotten}. {He} {hurried} back, just in time.",
    )


# --- a message -------------------------------------------------------------------------------------------------------


def message(w: World) -> None:
    """Words and a parcel are carried from one to another, past everything on the way."""
    introduce(w)
    w.bring("other")
    w.hold("thing", "elder")
    w.fields["words"] = w.dice.pick(MESSAGES)
    w.say(
        'One {sky} {time} {elder} said, "{hero}, please go {to_place}. Give this {thing} to {friend_the}, and say: '
        '{words}."',
        '"I have a job for you, {hero}," said {elder} one {sky} {time}. "Take this {thing} {to_place}, to '
        '{friend_the}, and say: {words}."',
        '{elder} had a message for {friend_the}. "Take {him2} this {thing}," {he4} told {hero}. "You will find '
        '{him2} {in_place}. And say: {words}."',
    )
    w.give("thing", "elder", "hero")
    w.say(
        "{hero} took the {fine} and said the words over and over, so as not to forget them.",
        '"I will remember," said {hero}, and off {he} went with the {fine}.',
        "{hero} put the {fine} into {his} bag and set off.",
    )
    w.paragraph()
    remark(w, 60)
    w.say(
        'On the way {he} met {other_the}. "Come and [play|look at this|join us]," said {other}. "Later," said '
        '{hero}. "I have a message."',
        "{other_the} called to {him}, but {hero} only waved and went on.",
        "{a_bug} wanted to be chased, but {hero} did not stop.",
        "The way was long, and there was much to see, but {hero} did not stop.",
    )
    w.maybe(
        45,
        '"{words}," {he} said under {his} breath.',
        "Once {he} almost forgot the words. {He} stood still and thought until they came back.",
    )
    remark(w, 25)
    w.paragraph()
    _deliver(w)
    w.ending = "delivered"
    moral(
        w,
        "a good messenger keeps the words safe",
        "work comes first and play comes after",
        "you can remember a thing if you say it often",
        "it is good to be someone others can count on",
    )
    night(w)


def _deliver(w: World) -> None:
    w.say(
        "At last {he} [came|got] {to_place} and found {friend}.",
        "{friend} was waiting {in_place}.",
        "And there was {friend}.",
    )
    w.give("thing", "hero", "friend")
    w.recall("same_words", w.fields["words"])
    w.say(
        '"This {thing} is for you," said {hero}. "And {elder} says: {same_words}."',
        '{hero} gave {him2} the {thing}. "I am to tell you this," {he} said. "{same_words}."',
        '"{elder} sends you this {thing}," said {hero}, "and says: {same_words}."',
    )
    w.say(
        '"Thank you for telling me, {hero}," said {friend}. "[You did not forget a word|What a good memory you have]!"',
        '{friend} laughed for joy. "I have waited for that," {he2} said.',
        '"That is [good|important] news," said {friend}.',
    )
    w.maybe(
        60,
        'At home {elder} asked, "Did you remember?" "Every word," said {hero}.',
        "{hero} walked home {simile}.",
        "{hero} was {glad} that {he} had remembered.",
    )


# --- something broken ------------------------------------------------------------------------------------------------

BREAKABLE_LOOKS = phrases("painted, antique, striped, spotted, handmade, flowered, gilded, checkered, speckled")


def honest(w: World) -> None:
    """Something of the elder's breaks. The hero tells at once, or hides the pieces and tells later."""
    introduce(w)
    w.describe("", Thing(w.noun, "treasure", BREAKABLE_LOOKS, ""))
    w.say(
        "{elder} had {athing} that {he4} loved very much.",
        "On a little table {in_place} stood {elder}'s {fine}.",
        "Nothing was dearer to {elder} than {his4} {fine}.",
    )
    w.paragraph()
    arrive(w)
    w.say(
        "{He} was {game} with {friend_the}, and {he} did not look where {he} was going.",
        "{He} should not have been {game} so close to {elder}'s {thing}.",
        "{He} only wanted to hold the {thing} for a moment.",
        "The {thing} looked so pretty. {He} just had to touch it.",
    )
    w.say(
        "{crash}! The {thing} fell down and broke into {pieces} pieces.",
        "Then there was a loud {crash}. There lay {elder}'s {thing}, in {pieces} pieces.",
        "The {thing} wobbled, it fell, and {crash}! It was broken.",
    )
    w.maybe(
        65,
        '"{alas}!" {whispered} {hero}. {His} heart [sank|beat fast].',
        "{hero} turned as white as [milk|chalk|flour].",
    )
    remark(w, 15)
    if w.chance(45):
        _tell_at_once(w)
    else:
        _hide_the_pieces(w)
    w.maybe(
        70,
        "Together they glued the {thing}, piece by piece. It had [a crack|a few cracks], but it was whole again.",
        "That evening they sat down with a pot of glue, and soon the {thing} stood in its place again.",
        "{elder} brought the glue, and {hero} held the pieces until they were dry.",
    )
    moral(
        w,
        "the truth makes the heart light",
        "everyone makes mistakes, and brave people admit them",
        "a thing can be mended, and so can a mistake",
        "telling the truth is hard, but hiding it is harder",
        elder=True,
    )


def _tell_at_once(w: World) -> None:
    w.maybe(
        50,
        '"[Hide it|Say it was the cat]," said a little voice inside {him}. But {hero} shook {his} head.',
        "For a moment {he} thought of running away.",
    )
    w.paragraph()
    w.say(
        '{hero} went straight to {elder}. "I broke your {thing}," {he} said. "I am so sorry."',
        '{hero} took a deep breath and went to {elder}. "Something bad has happened," {he} said. "I broke your '
        '{thing}."',
        '"{elder}," said {hero}, "I have to tell you something. I broke your {thing}."',
    )
    w.say(
        '{elder} was {sad} for a moment. Then {he4} said {softly}, "Thank you for telling me the truth."',
        '"Oh, my {thing}," sighed {elder}. But then {he4} took {hero} by the hand. "[You told me at once|That was '
        'brave of you]," {he4} said.',
        '"I am not angry," said {elder}. "You told me the truth, and that is worth more than {a_thing}."',
    )
    w.ending = "told"


def _hide_the_pieces(w: World) -> None:
    w.hold("pieces", "hero")
    w.put("pieces", "hero", w.a_spot())
    w.say(
        "Quickly {he} gathered the pieces and hid them {pieces_spot}.",
        "Nobody had seen it. So {hero} swept up the pieces and hid them {pieces_spot}.",
        "Where could {he} hide the pieces? {He} put them {pieces_spot}.",
    )
    w.paragraph()
    w.maybe(
        60,
        "All day long {he} could think of nothing else.",
        '"Has anyone seen my {thing}?" asked {elder}. {hero} looked at the floor and felt {sad}.',
        "{elder} looked for the {thing} everywhere, and {hero} [grew quieter and quieter|could not look at {him4}].",
    )
    w.say(
        "That night {he} could not sleep. At last {he} went to {elder}.",
        "In the end {he} could not bear it any longer. {He} went to {elder}.",
        "At last {hero} pulled {elder} by the sleeve.",
    )
    w.find("pieces", "elder")
    w.say(
        '"I broke your {thing}," {he} said. "The pieces are {pieces_found}. I was afraid to tell you."',
        '"Look {pieces_found}," {he} said, and {he} began to cry. "I broke your {thing}, and I hid it."',
    )
    w.say(
        '{elder} put an arm around {him}. "I am sad about the {thing}," {he4} said, "but I am glad that you told me."',
        '"[A thing like that can be mended|Hush, now]," said {elder}. "I would always rather know the truth."',
        '"It is good that you told me," said {elder}. "Now you need not carry it alone."',
    )
    w.ending = "confessed"


# --- a false alarm ---------------------------------------------------------------------------------------------------

THIEVES = phrases("goat, magpie, puppy, monkey, crow, raccoon, fox, jackdaw, donkey, ferret, pony, seagull")


def false_alarm(w: World) -> None:
    """Twice the hero cries for help in jest; the third time it is true and nobody comes."""
    introduce_owner(w)
    w.paragraph()
    w.fields["thief"] = w.dice.pick(THIEVES)
    arrive(w)
    w.say(
        '{He} was bored. So {he} shouted, "Help! Help! A {thief} has taken my {thing}!"',
        'Nothing happened there all {time}, so {hero} thought of a joke. "Help!" {he} {cried}. "A {thief} is '
        'stealing my {thing}!"',
        '{hero} liked jokes, even bad ones. "Help!" {he} {cried}. "A {thief} has got my {thing}!"',
    )
    w.say(
        "{elder} and {friend_the} came running. But there was no {thief}. {hero} only laughed.",
        'At once {friend_the} and {elder} came to help. "[I fooled you|It was a joke]," said {hero}.',
    )
    w.say(
        'A little later {he} did it again. "The {thief}! The {thief}!" Again they came, and again it was only a joke.',
        'Soon {hero} shouted once more. "Help! The {thief} is back!" They came running, and {hero} laughed.',
        "An hour later {hero} shouted for help again. They came, and again there was nothing.",
    )
    w.maybe(
        50,
        '"That is not funny," said {friend}.',
        "{elder} [frowned|shook {his4} head] and went away.",
        "Nobody else laughed.",
    )
    w.paragraph()
    _really_stolen(w)
    w.paragraph()
    w.say(
        '{hero} went to {elder} and {friend}. "I am sorry that I fooled you," {he} said. "[I will not do it again|It '
        'was wrong]."',
        '"Why did you not come?" asked {hero}. "How could we know that it was true?" said {elder}. {hero} '
        "[nodded|said sorry].",
        '"From now on I will only call when it is true," {hero} told them, and {he} meant it.',
    )
    w.maybe(50, "They forgave {him} and helped {him} clean the {thing}.", "{friend} helped {hero} to mend the {thing}.")
    w.ending = "not believed"
    moral(
        w,
        "nobody believes a liar, even when the liar tells the truth",
        "a cry for help is not a toy",
        "trust is easily spent and hard to earn",
    )


def _really_stolen(w: World) -> None:
    w.advance()
    w.give("thing", "hero", "thief")
    w.put("thing", "thief", w.a_spot())
    w.say(
        "{later}, a real {thief} came. It snatched the {thing} and [dropped|left] it {thing_spot}.",
        "But {later_on}, a real {thief} crept up, took the {thing}, and hid it {thing_spot}.",
        "{later}, {hero} looked away for a moment. Quick as a flash, a real {thief} took the {thing} and left it "
        "{thing_spot}.",
    )
    w.say(
        '"Help! [It is true|This time it is true]!" {cried} {hero}. But nobody came. "[Another joke|The same old '
        'joke]," they said.',
        "{hero} shouted and shouted. Everyone heard {him}, and no one came.",
    )
    w.find("thing", "hero")
    w.say(
        "Only after a long search did {he} find the {thing}. It lay {thing_found}, [muddy|chewed|scratched] and wet.",
        "{hero} had to look for the {thing} all alone. It was late when {he} found it {thing_found}.",
        "In the end {he} found the {thing} {thing_found}, but it was [bent|dirty|chewed].",
    )
