"""Plots about mine and yours: counting and giving away, a trade, a loan that is passed on, a quarrel.

Each plot takes a world and tells it to its end. Who has what, and how many, is read from the world at every sentence.
"""

from __future__ import annotations

from fuselm.data.story.beats import arrive, introduce, introduce_owner, meal, meet, moral, night, remark
from fuselm.data.story.things import COUNTABLES
from fuselm.data.story.world import World, number

SINGULARS = {many: one for one, many in COUNTABLES}

# --- counting --------------------------------------------------------------------------------------------------------


def amount(w: World, count: int) -> str:
    """'one apple', 'three apples'."""
    return f"{number(count)} {SINGULARS[w.noun] if count == 1 else w.noun}"


def count(w: World) -> None:
    """So many, some given away, then some more found or given away: what is left is what arithmetic says."""
    introduce(w)
    w.fields["many"] = w.noun
    arrive(w)
    start = w.counts["start"] = w.counts["hero"] = 3 + w.dice.below(6)
    w.fields["start"], w.fields["start_number"] = amount(w, start), number(start)
    w.say(
        "{He} had a [basket|bag|little box] with {start} in it.",
        "{elder} had given {him} {start}.",
        "{hero} counted {his} {many}. There were exactly {start_number}.",
        "In {his} [pockets|bag|basket] {he} had {start}.",
    )
    remark(w, 40)
    _give_to_friend(w, 1 + w.dice.below(min(3, start - 2)))
    if w.chance(50):
        _find_more(w, 1 + w.dice.below(3))
    elif w.counts["hero"] > 1:
        _give_to_other(w, 1 + w.dice.below(min(2, w.counts["hero"] - 1)))
    remark(w, 40)
    w.paragraph()
    _count_what_is_left(w)
    moral(
        w,
        "what you give away comes back as joy",
        f"friends are worth more than {w.noun}",
        "there is enough when you share",
        "it is good to count what you have, and better to share it",
    )
    night(w)


def _give_to_friend(w: World, given: int) -> None:
    w.hand_out("friend", given)
    w.fields["given"], w.fields["given_number"] = amount(w, given), number(given)
    w.say(
        'Then {friend_the} came [by|along]. "[What nice {many}|I wish I had some {many}]," {he2} said. So {hero} '
        "gave {him2} {given}.",
        'There {he} met {friend_the}, who had [none|no {many} at all]. "[Here|We can share]," said {hero}, and {he} '
        "gave {him2} {given}.",
        '"May I have {given}?" asked {friend_the}. "[Yes|Of course|Gladly]," said {hero}, and {he} handed over '
        "{given_number}.",
        "{friend_the} looked so {sad} that {hero} gave {him2} {given}.",
    )
    w.maybe(50, "{friend} was {glad}.", '"Thank you, {hero}!" said {friend}.', "{friend} {smiled} and {strolled} off.")


def _give_to_other(w: World, given: int) -> None:
    w.bring("other")
    w.hand_out("other", given)
    w.fields["given3"] = amount(w, given)
    w.say(
        "A little later {other_the} came along, and {hero} gave {him3} {given3} too.",
        '"And what about me?" said {other_the}. {hero} laughed and gave {him3} {given3}.',
        "On the way home {he} saw {other_the} and thought, why not? So {other} got {given3} as well.",
    )


def _find_more(w: World, found: int) -> None:
    w.counts["found"] = found
    w.counts["hero"] += found
    w.fields["more"], w.fields["there"] = number(found), w.a_spot()
    w.say(
        "A little later {hero} looked {there} and found {more} more.",
        "And then, {there}, {hero} found {more} more!",
        '"You have a good heart," said {elder}, and {he4} gave {hero} {more} more.',
        "{elder} had seen it all and gave {him} {more} more.",
    )


def _count_what_is_left(w: World) -> None:
    left = w.counts["hero"]
    w.recall("left", number(left))
    w.fields["noun"] = SINGULARS[w.noun] if left == 1 else w.noun
    w.fields["was"] = "was" if left == 1 else "were"
    w.say(
        '"How many do you have now?" asked {elder}. {hero} counted [on {his} fingers|aloud|carefully]. "I have '
        '{left} {noun}," {he} said.',
        "In the evening {hero} counted again. Now {he} had {left} {noun}.",
        "At home {hero} put everything on the table. There {was} {left} {noun}.",
        '"Let me see," said {hero}, and {he} counted: that made {left} {noun}.',
    )
    w.say(
        '"[That is right|Correct|You count well]," said {elder}.',
        '"And how do you feel?" asked {elder}. "[Happy|Rich|As light as a feather]," said {hero}.',
        '{elder} {smiled}. "And a good heart as well," {he4} said.',
    )
    w.ending = "counted"


# --- trading ---------------------------------------------------------------------------------------------------------


def trade(w: World) -> None:
    """Two things change hands; either both are content, or they are missed and change hands again."""
    introduce_owner(w)
    w.another_thing("2")
    w.hold("second", "friend")
    w.paragraph()
    arrive(w)
    w.say(
        "There {he} met {friend_the}, who had {athing2}.",
        "{friend_the} was there too, {using2} {athing2}.",
        "{friend_the} came along with {athing2}.",
    )
    w.maybe(
        70,
        '"[What {a_nice} {thing2}|I like your {thing2}]!" said {hero}. "[And I like your {thing}|Your {thing} is '
        'nice too]," said {friend}.',
        "{hero} looked at the {thing2}, and {friend} looked at the {thing}.",
    )
    w.say(
        '"Shall we trade?" asked {friend}. "My {thing2} for your {thing}?" "[Yes|It is a deal|Gladly]!" said {hero}.',
        '"I will give you my {thing} for your {thing2}," said {hero}. {friend} [nodded|shook hands on it|agreed at '
        "once].",
        '"What would you give me for my {thing2}?" asked {friend}. {hero} thought about it. "My {thing}," {he} said.',
    )
    w.give("thing", "hero", "friend")
    w.give("second", "friend", "hero")
    w.say(
        "Now {hero} had the {fine2}, and {friend} had the {fine}.",
        "So the {fine2} went to {hero}, and the {fine} went to {friend}.",
        "{hero} took the {fine2}, and {friend} took the {fine}.",
    )
    remark(w, 40)
    meal(w, 25)
    w.paragraph()
    w.advance()
    if w.chance(50):
        _trade_back(w)
    else:
        _keep_the_trade(w)
    night(w)


def _trade_back(w: World) -> None:
    w.say(
        "{later}, {hero} {used2} the {thing2} for a while. But {he} kept thinking of {his} old {thing}.",
        "At first {hero} was {glad}. But {later_on}, {he} began to miss {his} {thing}.",
        "{later}, {hero} noticed that the {thing2} was nice, but that {his} own {thing} had been nicer.",
    )
    w.give("thing", "friend", "hero")
    w.give("second", "hero", "friend")
    w.recall("back", w.noun)
    w.recall("back2", w.fields["thing2"])
    w.say(
        '{He} went back to {friend}. "I miss my {back}," {he} said. "[Would you trade back|Can we trade again]?"',
        'Then {friend} came back. "I miss my {back2}," {he2} said. "And I miss my {back}," said {hero}.',
    )
    w.say(
        "{friend} was glad, too. So {hero} got back {his} {back}, and {friend} got back {his2} {back2}.",
        "They both laughed and traded back. {hero} had the {back} again, and {friend} had the {back2}.",
        "And so the {back} went home with {hero}, and the {back2} went home with {friend}.",
    )
    w.ending = "traded back"
    moral(
        w,
        "what you have may be what you love most",
        "new things are fun, but old things are dear",
        "you sometimes have to lose a thing to know what it is worth",
    )


def _keep_the_trade(w: World) -> None:
    w.recall("new", w.fields["thing2"])
    w.recall("new2", w.noun)
    w.say(
        '{later}, {elder} asked, "What do you have there?" "My new {new}," said {hero}. "{friend} has my old {new2} '
        'now."',
        "{later}, {hero} was still {using2} the {new}, and {friend} was still {using} the {new2}.",
        "{later}, {hero} showed {elder} the {new}. {friend} showed everyone the {new2}.",
    )
    w.say(
        '"Are you happy with it?" asked {elder}. "Yes," said {hero}, "and so is {friend}."',
        "Both {hero} and {friend} were {glad}. They shook hands again.",
        '"That was a good trade," said {friend}, and {hero} thought so too.',
    )
    w.ending = "traded"
    moral(
        w,
        "a fair trade makes two people happy",
        "what one is tired of, another may love",
        "it is good to ask before you trade",
    )


# --- lending ---------------------------------------------------------------------------------------------------------


def lend(w: World) -> None:
    """The thing goes from the hero to the friend and on to another; it comes back the same way."""
    introduce_owner(w)
    w.bring("other")
    w.paragraph()
    arrive(w)
    w.say(
        'There {friend_the} asked, "May I borrow your {thing}?" "[Yes|Of course], but [take care of it|bring it '
        'back]," said {hero}.',
        '"Could you lend me your {thing}?" asked {friend_the}. {hero} [nodded|thought about it]. "[All right|Yes]," '
        "{he} said.",
        "{friend_the} wanted to borrow the {thing}, and {hero} lent it to {him2}.",
    )
    w.give("thing", "hero", "friend")
    w.maybe(
        40,
        "So {friend} took the {thing} home.",
        "{friend} went off with the {thing}, [singing|whistling|hopping].",
    )
    remark(w, 25)
    w.give("thing", "friend", "other")
    w.say(
        'The next day {other_the} saw it. "May I borrow that?" {he3} asked. And {friend} gave it to {other}.',
        "But {friend} lent it to {other_the}, who [needed it for {reason}|had begged for it].",
        "Then {friend} lent it to {other_the}, without asking {hero}.",
    )
    w.put("thing", "other", w.a_spot())
    w.say(
        "{other} put it {thing_spot}, so that it would be safe.",
        "{other} {used} it, and then {he3} put it {thing_spot}.",
        "And {other} left it {thing_spot}.",
    )
    w.paragraph()
    w.say(
        "On {weekday} {hero} needed {his} {thing} for {reason}. {He} went to {friend}.",
        "A week later {hero} wanted the {thing} back. {He} asked {friend} for it.",
        '"Where is my {thing}?" {hero} asked {friend} some days later.',
    )
    w.recall("borrower", w.cast["other"].name)
    w.say(
        '"{alas}," said {friend}. "I do not have it. I lent it to {borrower}." {hero} was [{cross}|{sad}].',
        '{friend} turned red. "I gave it to {borrower}," {he2} said. "[I should have asked you|I am sorry]."',
        '"I lent it to {borrower}," said {friend} in a small voice.',
    )
    _bring_it_back(w)
    w.ending = "given back"
    moral(
        w,
        "you cannot lend what is not yours",
        "a borrowed thing should come back",
        "it is right to ask before you lend",
        "whoever borrows must take good care",
    )


def _bring_it_back(w: World) -> None:
    w.find("thing", "other")
    w.say(
        'So they went to {other} together. "[Do not worry|It is safe]," said {other}. "It is {thing_found}." And '
        "there it was.",
        '"Where is the {thing}?" they asked {other}. {other} led them {to_place}. It was still {thing_found}.',
        "They went to {other}, who had to think for a moment. Then {he3} showed them: the {thing} was {thing_found}.",
    )
    w.give("thing", "other", "friend")
    w.give("thing", "friend", "hero")
    w.say(
        "{other} gave it to {friend}, and {friend} gave it back to {hero}.",
        "{other} took it {thing_out} and gave it to {friend}, and {friend} put it into {hero}'s hands.",
        "From {other} it went to {friend}, and from {friend} it went back to {hero}.",
    )
    w.maybe(
        60,
        '"Next time I will ask you first," said {friend}. {hero} {smiled}.',
        '"Thank you," said {hero}. "[I was worried|I am glad to have it back]."',
    )


# --- quarreling ------------------------------------------------------------------------------------------------------


def quarrel(w: World) -> None:
    """Two want one thing, pull, and it breaks; mended, it is shared by turns."""
    introduce(w)
    arrive(w)
    remark(w, 30)
    meet(w)
    w.fields["there"] = w.a_spot()
    w.say(
        "At the same moment they both saw {athing} {there}.",
        "They looked {there} and found {athing}.",
        "And what lay {there}? It was {athing}.",
        "Somebody had left {athing} {there}.",
    )
    w.paragraph()
    w.say(
        '"I saw it first!" said {hero}. "No, I did!" said {friend}.',
        '"[It is mine|Mine]!" {cried} {hero}. "No, mine!" {cried} {friend}.',
        '{hero} wanted it. {friend} wanted it too. "Give it to me!" they both {cried}.',
    )
    w.say(
        "{hero} took hold of one end, and {friend} took hold of the other. They pulled and pulled.",
        "They both grabbed it. {hero} pulled to the left, and {friend} pulled to the right.",
        "They tugged at it, back and forth, and neither would let go.",
    )
    w.say(
        "{snap}! [A piece broke off|It came apart|It cracked], and they both fell down.",
        "Then there was a loud {snap}, and the {thing} was broken.",
        "{snap}! Now there were two halves of {a_thing}.",
    )
    w.maybe(
        65,
        "Nobody said a word.",
        "Now both of them were {sad}.",
        '"{alas}, look what we have done," {whispered} {hero}.',
    )
    w.paragraph()
    _mend_and_share(w)
    w.ending = "shared"
    moral(
        w,
        "sharing is better than pulling",
        "whoever wants all may end up with nothing",
        "a friend matters more than a thing",
        "taking turns keeps things whole",
        elder=True,
    )
    night(w)


def _mend_and_share(w: World) -> None:
    w.say(
        '{elder} had heard the noise. "A broken {thing} is no good to anyone," {he4} said {softly}.',
        '"When two pull, nobody wins," said {elder}, who had seen it all.',
        '{elder} came and looked at the pieces. "That was not very wise," {he4} said.',
    )
    w.maybe(
        70,
        '"I am sorry," said {hero}. "[Me too|So am I]," said {friend}.',
        '{hero} looked at {friend}, and {friend} looked at {hero}. "I am sorry," they both said at once.',
        "{hero} said sorry first, and then {friend} did.",
    )
    w.say(
        "Together they mended it with [glue|string and glue|wire and patience], and soon it was as good as new.",
        "{elder} showed them how to mend it. {hero} held it still, and {friend} tied it up with [string|tape|ribbon].",
        "It took [an hour|all {time}|a lot of glue], but they put it back together.",
    )
    w.say(
        "After that they took turns: {hero} had it in the morning, and {friend} had it in the afternoon.",
        '"You first," said {hero}. "No, you," said {friend}. And they both laughed.',
        "From then on {hero} had it on {weekday1}s, and {friend} had it on the other days.",
    )
