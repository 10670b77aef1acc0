"""Plots about where a thing is: lost and found, a hidden present, a treasure hunt, tidying up, a riddle.

Each plot takes a world and tells it to its end. What is found is found where the world says it lies.
"""

from __future__ import annotations

from fuselm.data.story.beats import arrive, introduce, introduce_owner, meal, meet, moral, night, remark
from fuselm.data.story.things import THINGS, Thing
from fuselm.data.story.world import THING_OF, World, with_article

# --- lost ------------------------------------------------------------------------------------------------------------


def lost(w: World) -> None:
    """The hero puts the thing away, forgets where, and finds it there."""
    introduce_owner(w)
    w.paragraph()
    arrive(w)
    remark(w, 25)
    w.put("thing", "hero", w.a_spot())
    w.fields["wrong1"], w.fields["wrong2"] = w.a_spot(), w.a_spot()
    w.say(
        'Then {elder} called, "{hero}, [please come|will you come|it is time to come] and {task1}!" So {he} put the '
        "{thing} {thing_spot} and [ran|hurried|went] to help.",
        "{He} {used} the {thing} until {elder} needed help to {task1}. [Quickly|In a hurry|Without thinking], {hero} "
        "left the {thing} {thing_spot}.",
        '"I must [stop|go] now," said {hero}. "I have to {task1}." {He} [laid|set|put] the {thing} {thing_spot}.',
        "But first {he} had to {task1}. {He} [hid|laid|placed] the {thing} {thing_spot}, where it would be safe.",
        '{elder} wanted {him} to {task1}. "[I am coming|Just a moment]!" said {hero}, and {he} put the {thing} '
        "{thing_spot}.",
        "{He} had promised {elder} to {task1}, so {he} left the {thing} {thing_spot} for a while.",
    )
    remark(w, 25)
    meal(w, 25)
    w.paragraph()
    _miss(w)
    if w.chance(50):
        _remember_with_a_friend(w)
    else:
        _remember_alone(w)
    w.ending = "found"
    moral(
        w,
        "a thing is easy to find when it has a place of its own",
        "it is better to think back than to run about",
        "whoever puts a thing away should remember where",
        "nothing is lost as long as you can remember",
    )
    night(w)


def _miss(w: World) -> None:
    w.advance()
    w.say(
        "{later}, {hero} wanted to {use} the {thing}, but {he} had forgotten where it was.",
        "{later}, {he} came back for the {thing}. It was [gone|nowhere to be seen]!",
        "{later}, {hero} [looked around|scratched {his} head]. Where was the {thing}?",
        '{later}, {hero} thought of the {thing}. "Now where did I put it?" {he} said.',
    )
    w.maybe(
        50,
        '"{alas}, [where can it be|I have lost it]!" {cried} {hero}.',
        "{hero} felt {sad}.",
        '"[Where is|Who has seen] my {fine}?" asked {hero}.',
        "{He} [looked high and low|turned in circles|checked all {his} pockets].",
    )
    w.say(
        "{He} looked {wrong1}, but there was only {junk}.",
        "{He} [searched|looked|peeked] {wrong1} and found {junk}, but no {thing}.",
        "Was it {wrong1}? No, there was [nothing but|only] {junk}.",
        "{He} looked {wrong1}. Nothing was there, except {junk}.",
    )
    w.maybe(
        45,
        "{He} looked {wrong2}. [Nothing|No luck|Not there either].",
        "Then {he} tried {wrong2}, but [that was no good|it was not there].",
        "Was it {wrong2}? No, it was not there either.",
    )


def _remember_with_a_friend(w: World) -> None:
    w.paragraph()
    w.say(
        '{friend_the} came by. "[What is wrong|Why so {sad}|What are you looking for]?" asked {friend}. "I have lost '
        "my "
        '{thing}," said {hero}.',
        '{His} friend {friend_the} [stopped|came over]. "What have you lost?" {he2} asked. "My {thing}," said {hero}.',
        "{friend_the} saw {him} searching and came to help.",
        '"Have you seen my {thing}?" {hero} asked {friend_the}. But {friend} had not.',
    )
    w.say(
        '"[Close your eyes and think|Think back|Think hard]," said {friend}. "[What did you do|Where were you] '
        "before you "
        'had to {task1}?"',
        '"Go back in your mind," said {friend}, "to when {elder} needed you."',
        '"When did you last have it?" asked {friend}. "Before I had to {task1}," said {hero} slowly.',
    )
    w.find("thing", "hero")
    w.say(
        '{hero} thought. "[I remember|Now I know|Oh]!" {he} {cried}. "I put it {thing_found}!" They [ran|hurried] to '
        "look, and there it was.",
        "{hero} closed {his} eyes. Then {he} {hurried} to look {thing_found}. There was the {thing}, just where {he} "
        "had left it!",
        "Step by step, {hero} remembered. The {thing} was {thing_found}, of course! {He} took it {thing_out} and "
        "[laughed|danced].",
        'And all at once {hero} knew. "It is {thing_found}!" And so it was.',
    )
    w.maybe(
        60,
        '"Thank you, {friend}!" said {hero}, and {he} was {glad}.',
        "{friend} {smiled}. {hero} held the {thing} tight.",
        "Then the two friends {shared}.",
    )


def _remember_alone(w: World) -> None:
    w.paragraph()
    w.say(
        '{hero} sat down and took a deep breath. "[Think, {hero}, think|Be calm|One thing at a time]," {he} told '
        "{himself}.",
        '"[Hush, now|Wait a moment]," {hero} said to {himself}. "What did I do before I had to {task1}?"',
        "Then {hero} had an idea. {He} walked the same way that {he} had come, {carefully}, step by step.",
        "{hero} stopped running about and began to think.",
    )
    w.find("thing", "hero")
    w.say(
        "And then {he} remembered: {thing_found}! {He} {hurried} over, and there was the {thing}.",
        '"I put it {thing_found}!" {he} {cried}. And so {he} had. The {thing} was waiting there.',
        "At last {he} looked {thing_found}, and there lay the {thing}, just as {he} had left it.",
        "It had to be {thing_found}. {He} looked, and {he} was right!",
    )
    w.maybe(
        75,
        '"{wow}!" {cheered} {hero}. [{elder} laughed|{elder} clapped|Even {elder} cheered].',
        "{hero} was {glad}. {He} {used} the {thing} until [dark|bedtime].",
        "{hero} [held|hugged] the {thing} and would not let go.",
    )


# --- surprise --------------------------------------------------------------------------------------------------------


def surprise(w: World) -> None:
    """The hero hides a present; the friend nearly finds it; it comes out of its hiding place on the day."""
    introduce(w)
    w.fields["day"] = w.fields["gift_day"]
    w.hold("thing", "hero")
    w.say(
        "{His} best friend was {friend_the}. Soon it would be {friend}'s {day}.",
        "{friend_the} was {his} best friend, and {friend}'s {day} was [near|coming].",
        "In [two|three] days {his} dearest friend, {friend_the}, would have {his2} {day}.",
    )
    w.say(
        "{hero} had [saved up for|bought|found] {athing} as a [present|surprise].",
        'With the help of {elder}, {hero} had [found|bought] {athing}. "[It must stay a secret|Not a word]!" said '
        "{hero}.",
        "{hero} wanted to give {him2} {athing}.",
        "For weeks {hero} had looked for a present, and now {he} had one: {athing}.",
    )
    w.paragraph()
    w.put("thing", "hero", w.a_spot())
    w.fields["near"] = w.a_spot()
    arrive(w)
    w.say(
        "{He} hid the {thing} {thing_spot}, where nobody would look.",
        "{He} looked left and right. Nobody was there, so {he} hid the {thing} {thing_spot}.",
        "{hero} wrapped the {thing} in [{color} paper|a cloth|an old newspaper] and hid it {thing_spot}.",
        "It had to be hidden. {hero} put the {thing} {thing_spot}.",
    )
    remark(w, 25)
    w.say(
        'Just then {friend} came along. "What are you doing, {hero}?" {he2} asked.',
        '"What are you hiding?" said a voice. It was {friend}!',
        'Suddenly there was {friend}. "You look as if you had a secret," said {friend}.',
    )
    w.maybe(
        65,
        '"[Nothing|Oh, nothing at all]," said {hero}, and {his} [ears|cheeks] turned red.',
        '{hero} [coughed|blinked|whistled a tune]. "I am only [resting|looking around|counting the {bug}s]," {he} '
        "said.",
    )
    w.maybe(
        65,
        '{friend} looked {near}, but there was only {junk}. "[Come on|Quick]," said {hero}, "let us go and play!"',
        "{friend} looked {near}, just to be sure, and found {junk}. {hero} [smiled to {himself}|breathed again].",
        "{friend} was curious and looked {near}. {hero} held {his} breath. But {friend} found only {junk} and gave up.",
    )
    w.paragraph()
    _give_surprise(w)
    w.ending = "given"
    moral(
        w,
        "a secret can be a kind of present",
        "giving is as much fun as getting",
        "a good surprise is worth the wait",
        "the best secrets are the ones that make a friend happy",
    )
    night(w)


def _give_surprise(w: World) -> None:
    w.find("thing", "hero")
    w.say(
        "At last the {day} came. {hero} {hurried} {to_place}, looked {thing_found}, and took out the {thing}.",
        "When the day came, the {thing} was still {thing_found}. {hero} carried it to {friend} [with both "
        "hands|behind {his} back].",
        'On the day itself, {hero} led {friend} {to_place} and said, "Now look {thing_found}!" There lay the {thing}.',
        "Then came the {day}. The {thing} was waiting {thing_found}, and {hero} took it to {friend}.",
    )
    w.give("thing", "hero", "friend")
    w.say(
        '"For you," said {hero}. "{wow}!" {cheered} {friend}. "[I love it|It is just what I wished for|What {a_nice} '
        '{thing}]!"',
        '"Surprise!" {cheered} {hero}. {friend} was so {happy} that {he2} [danced|jumped up and down|hugged {hero} '
        "twice].",
        '"{wow}!" said {friend}. "Is it for me?" "Yes," said {hero}, "for your {day}."',
    )
    w.maybe(
        60,
        "{friend} {used} the {thing} all day.",
        '"So that was your secret!" said {friend}, and both of them laughed.',
        "{friend} kept the {thing} for years and years, and {hero} was {glad}.",
    )


# --- treasure hunt ---------------------------------------------------------------------------------------------------


def hunt(w: World) -> None:
    """Two notes, each of which says where to look next; the thing is where the second one says."""
    introduce(w)
    arrive(w)
    meet(w)
    w.hold("thing", "elder")
    w.hold("note", "elder")
    w.put("note", "elder", w.a_spot())
    w.put("thing", "elder", w.a_spot())
    w.paragraph()
    w.say(
        '{elder} had made a treasure hunt for them. "[Here is your first clue|Read this]," {he4} said. The note '
        'said: "Look {note_spot}."',
        'There lay a note from {elder}. "[Find the treasure|A game for two]!" it said. "[Start|Look] {note_spot}."',
        '"Who wants to hunt for treasure?" asked {elder}. "[I do|We do|Me, me]!" {cried} {hero}. "Then [look|begin] '
        '{note_spot}," said {elder}.',
        '"I have hidden something {in_place}," said {elder}. "If you want to know where, look {note_spot}."',
    )
    w.maybe(
        50,
        '"I will get there first!" said {friend}, but they ran together.',
        "{friend} could hardly stand still.",
        '"Come on, {friend}!" {cried} {hero}.',
    )
    w.find("note", "hero")
    w.say(
        "They {hurried} to look {note_found}. There they found [a second|another] note.",
        "{hero} looked {note_found}. Sure enough, there was [another|a second] note, [rolled up|folded small].",
        "There was indeed something {note_found}: it was {junk}, and under it lay a second note.",
        "And {note_found} there was a [paper|note] with [curly|crooked|neat] letters.",
    )
    remark(w, 35)
    w.say(
        '"[Well done|Very good|Clever you]," {friend} read aloud. "Now look {thing_spot}."',
        'This one said: "[Not far now|You are close]! The treasure is {thing_spot}."',
        'In {color} ink it said: "Go and look {thing_spot}."',
        '"What does it say?" asked {friend}. {hero} read it slowly: "Look {thing_spot}."',
    )
    w.paragraph()
    _claim_treasure(w)
    w.ending = "found"
    moral(
        w,
        "two heads find more than one",
        "a treasure is best when it is shared",
        "one step leads to the next",
        "good clues are worth reading twice",
        elder=True,
    )
    night(w)


def _claim_treasure(w: World) -> None:
    w.find("thing", "hero")
    w.say(
        "{hero} and {friend} [raced|ran|crept] to look {thing_found}, and there it was: {athing}!",
        "They went to look {thing_found}. Something [shone|peeked out|was wrapped in cloth] there. It was {athing}!",
        "{hero} reached the spot first. And {thing_found} lay {athing}.",
        "What was that {thing_found}? {hero} reached for it. It was {athing}!",
    )
    w.maybe(
        70,
        '"{wow}!" {cheered} {friend}. "[What {a_nice} treasure|We found it]!"',
        '"Treasure!" {cheered} {hero}, and {friend} clapped.',
        "{elder} {smiled} when {he4} saw their faces.",
    )
    w.say(
        '"[It belongs to both of us|We found it together]," said {hero}. So they took turns with it.',
        "{hero} had it in the morning, and {friend} had it in the afternoon.",
        "They decided to share it: one day for {hero}, one day for {friend}.",
        "They {shared}, and {hero} let {friend} go first.",
    )


# --- tidying up ------------------------------------------------------------------------------------------------------


def tidy(w: World) -> None:
    """Three things are put in three spots; later somebody asks for one of them."""
    introduce(w)
    w.another_thing("2")
    w.another_thing("3")
    w.say(
        "One {sky} {time} there was a [terrible|dreadful|great] mess {in_place}.",
        "{hero} was not very tidy, and {in_place} there were things everywhere.",
        'One {time} {elder} came {to_place} and [gasped|shook {his4} head|almost tripped]. "What a mess!" {he4} said.',
        "{elder} and {hero} were {in_place} one {sky} {time}. All kinds of things lay about.",
    )
    w.say(
        '"[Please put|{hero}, put] each thing in its place," said {elder}, "and remember where it is."',
        '"[Before we go|Before we play|First], everything must be put away," said {elder}.',
        '"Time to tidy up," said {elder}. "[I will sweep, and you put things away|You know where things go]."',
    )
    w.paragraph()
    _put_away_three(w)
    remark(w, 40)
    w.maybe(
        60,
        '"[Much better|Now one can walk again|How nice it looks]!" said {elder}.',
        "When it was done, {hero} was {tired} but {glad}.",
        "{elder} {smiled}. Everything had its place.",
    )
    meal(w, 25)
    w.paragraph()
    w.advance()
    _ask_for_it(w)
    w.ending = "fetched"
    moral(
        w,
        "a tidy place saves a long search",
        "a thing that is put away is quickly found",
        "it is easy to find a thing when you know where you put it",
    )
    night(w)


def _put_away_three(w: World) -> None:
    """In any order: the one that is asked for later may be first, second or last."""
    first = w.dice.below(3)
    for order in range(3):
        suffix = ("", "2", "3")[(first + order) % 3]
        item = f"thing{suffix}"
        w.hold(item, "hero")
        w.put(item, "hero", w.a_spot())
        w.fields[f"put{order}"] = f"the {w.fields['fine' + suffix]}"
        w.fields[f"there{order}"] = w.lies[item]
    w.say(
        "{hero} put {put0} {there0}. {He} put {put1} {there1}. And {he} put {put2} {there2}.",
        "So {hero} began. First {put0} went {there0}. Then {put1} went {there1}. Last of all, {put2} went {there2}.",
        '"I will put {put0} {there0}," said {hero}, "and {put1} {there1}, and {put2} {there2}." [Soon|In no time] it '
        "was done.",
        "{hero} picked up {put0} and put it {there0}. {He} found a spot {there1} for {put1}. Only {put2} was left, "
        "and that went {there2}.",
    )


def _ask_for_it(w: World) -> None:
    w.say(
        '{later}, {friend_the} came [to visit|by]. "[Do you have|Could I borrow|May I see] the {thing}?" asked '
        "{friend}.",
        '{later}, {friend_the} came running. "I need the {thing} for {reason}," {he2} said. "[Do you know where it '
        'is|Is it here]?"',
        '{later}, {elder} asked, "{hero}, where is the {fine}? {friend_the} would like to [see|borrow] it."',
    )
    w.find("thing", "hero")
    w.say(
        '{hero} did not have to think long. "It is {thing_found}," {he} said, and {he} {hurried} to get it.',
        '"I know!" said {hero}. "It is {thing_found}." And so it was.',
        "{hero} went straight to look {thing_found}, and came back with the {thing}.",
        '"Of course," said {hero}. "I put it {thing_found}." A moment later {he} was back with it.',
    )
    w.give("thing", "hero", "friend")
    w.say(
        '"[How quick you were|That was fast|You found it at once]!" said {friend}. "Thank you, {hero}."',
        '{friend} was {glad}. "At my house that would take [an hour|all day]," {he2} said to {hero}.',
        "{friend} thanked {hero} and went off with the {thing}.",
    )


# --- riddle ----------------------------------------------------------------------------------------------------------

GROUP_HINTS = {
    "toy": "It is something to play with",
    "wear": "It is something to wear",
    "book": "It has to do with paper",
    "tool": "It is a useful thing",
    "music": "It makes music",
    "treasure": "It is something precious",
    "ride": "It can go very fast",
}


def riddle(w: World) -> None:
    """The friend hides a thing in a bag and describes it; a guess that fits the first hint, then the right one."""
    thing = THING_OF[w.noun]
    introduce(w)
    arrive(w)
    w.hold("thing", "friend")
    w.paragraph()
    w.say(
        "There {he} met {friend_the}, who was holding [a bag|a box|something] behind {his2} back.",
        "{friend_the} came along with a [cloth bag|big box|brown sack] and a sly smile.",
        "{friend_the} was sitting there with a [covered basket|tied-up bundle|shut box].",
    )
    w.say(
        '"[Guess what I have|Guess what this is]!" said {friend}. "If you guess right, you may {use} it."',
        '"I have a secret [here|with me]," said {friend}. "Can you guess what it is?"',
        '"I bet that you cannot guess what I have," said {friend}.',
    )
    remark(w, 30)
    w.fields["hint1"], w.fields["hint2"] = GROUP_HINTS[thing.group], thing.riddle
    w.fields["guess1"] = w.dice.pick([t.noun for t in THINGS if t.group == thing.group and t.noun != thing.noun])
    w.say(
        '"Give me a hint," said {hero}. "{hint1}," said {friend}. "Is it {a_guess1}?" asked {hero}. "[No|No, no|Not '
        'quite]," said {friend}.',
        '"What is it like?" asked {hero}. "{hint1}," said {friend}. "[Could it be|Is it] {a_guess1}?" asked {hero}. '
        '"[Wrong|No|Cold, cold]!" {friend} '
        "laughed.",
        '"[Here is a hint|Listen]. {hint1}," said {friend}. "{A_guess1}!" said {hero}. "[No, try again|Not that]," '
        "said {friend}.",
    )
    w.say(
        '"[Here is another hint|Listen well|One more hint]. {hint2}."',
        '"[Think|Here is more]. {hint2}," said {friend}.',
        '{hero} wanted to know more. "{hint2}," said {friend}.',
    )
    w.paragraph()
    _guess_right(w, thing)
    w.ending = "guessed"
    moral(
        w,
        "it pays to listen closely",
        "a hint is a small door, and thinking is the key",
        "a wrong guess can be a step toward the right one",
    )
    night(w)


def _guess_right(w: World, thing: Thing) -> None:
    w.recall("answer", thing.noun)
    w.fields["article"] = with_article(thing.noun).partition(" ")[0]
    w.say(
        '{hero} thought [hard|for a long time|and thought]. Then {his} eyes lit up. "It must be {article} {answer}!" '
        "{he} {cried}.",
        '"[I know|I have it|Oh, that is easy]!" {cried} {hero}. "It is {article} {answer}!"',
        '{hero} [counted on {his} fingers|closed {his} eyes|hummed]. "Then it is {article} {answer}," {he} said at '
        "last.",
        '"Is it {article} {answer}?" asked {hero}, and {friend} began to laugh.',
    )
    w.give("thing", "friend", "hero")
    w.say(
        '"[Right|Yes|You guessed it]!" said {friend}, and {he2} [took|brought] out {athing}.',
        "{friend} laughed and showed {him} what it was: {athing}.",
        "It was! {friend} put {athing} into {his} hands.",
    )
    w.say(
        "{hero} and {friend} {shared} [all {time}|until dark|for the rest of the day].",
        '"Now it is your turn to think of a riddle," said {friend}. {hero} {smiled}.',
        "{friend} let {hero} {use} the {thing} [first|as long as {he} liked].",
    )
