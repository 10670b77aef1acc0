"""What stories are about: things with their looks and riddles, breakables, food, plants, and what can be built.

Data only. Every thing is one thing ("it", never "they"), small enough to be put into any spot, and belongs to a group
that says what one does with it.

    thing = THINGS[0]
    thing.noun, thing.materials, USES[thing.group].past       # "ball", ("rubber", ...), "played with"
"""

from __future__ import annotations

from typing import NamedTuple

from fuselm.data.story.words import phrases


class Use(NamedTuple):
    """What one does with a thing of a group: I want to ... it, he ... it, he was ... it, they ..."""

    base: str
    past: str
    doing: str
    together: str


class Thing(NamedTuple):
    """A thing; `riddle` describes it without naming it."""

    noun: str
    group: str
    materials: tuple[str, ...]
    riddle: str


USES = {
    "toy": Use("play with", "played with", "playing with", "played with it together"),
    "wear": Use("wear", "wore", "wearing", "took turns wearing it"),
    "book": Use("look through", "looked through", "looking through", "looked through it together"),
    "tool": Use("use", "used", "using", "tried it out together"),
    "music": Use("play", "played", "playing", "took turns playing it"),
    "treasure": Use("look at", "looked at", "looking at", "took turns holding it"),
    "ride": Use("push", "pushed", "pushing", "took turns with it"),
}

# group, noun, materials, riddle
_THINGS = """
toy ball; rubber, leather, felt; It is round, it rolls, and it bounces
toy kite; paper, silk, cloth; It has a long tail and flies when the wind blows
toy boat; wooden, tin, cork; It floats, and it has a sail
toy doll; rag, porcelain, wooden; It has a painted face, and you can rock it to sleep
toy puppet; wooden, cloth, felt; It has strings, and it dances when you pull them
toy spinning top; tin, wooden, brass; It spins and spins until it gets dizzy and falls over
toy yo-yo; wooden, plastic, tin; It goes down a string and climbs back up again
toy robot; tin, cardboard, plastic; It has square feet and says beep
toy train; wooden, tin, clockwork; It has wheels and goes choo-choo
toy puzzle; wooden, cardboard, jigsaw; It comes in many pieces that fit together
toy teddy bear; plush, velvet, woolly; It is furry and soft, and it never growls
toy marble; glass, clay, striped; It is small and round, and you can see light through it
toy jump rope; cotton, braided, nylon; You hold both ends and hop when it comes around
toy hoop; wooden, metal, wicker; It is a big circle that rolls beside you
toy dinosaur; rubber, plastic, clay; It has a long neck and lived long ago
toy airplane; paper, balsa, tin; It has two wings but no feathers
toy slingshot; wooden, rubber, forked; It looks like the letter Y
toy pinwheel; paper, foil, plastic; It whirls on a stick when you blow on it
toy rattle; wooden, silver, gourd; Babies love to shake it
toy balloon; shiny, rubber, foil; It gets bigger when you blow into it
toy beanbag; corduroy, cloth, burlap; It is soft and full of beans
toy dragon; paper, cloth, felt; It has wings and breathes pretend fire
toy globe; tin, glass, cardboard; It shows the whole world and turns around
toy rocket; cardboard, tin, plastic; It points at the stars and goes whoosh
wear hat; straw, felt, woolen; You put it on your head
wear scarf; woolen, silk, knitted; It keeps your neck warm
wear cape; velvet, silk, satin; It hangs from your shoulders like wings
wear mask; paper, leather, feathered; It hides your face
wear crown; paper, tin, cardboard; Kings and queens wear it
wear necklace; bead, shell, coral; It is a string of pretty things for your neck
wear bracelet; bead, copper, woven; It goes around your wrist
wear belt; leather, woven, canvas; It keeps your pants from falling down
wear raincoat; rubber, oilcloth, plastic; It keeps you dry when it pours
wear sweater; woolen, knitted, striped; Somebody knitted it, and it has two long sleeves
wear apron; linen, checkered, cotton; Cooks tie it around the waist
wear bonnet; lace, cotton, ruffled; It is tied with a bow under the chin
wear vest; quilted, corduroy, tweed; It has buttons and pockets but no sleeves
wear helmet; metal, leather, plastic; It is hard and keeps your head safe
wear bow tie; satin, polka-dot, silk; It looks like a butterfly under your chin
book storybook; picture, leather, pop-up; It has pages, and it begins with once upon a time
book map; parchment, paper, pirate; It shows you the way
book atlas; pocket, leather, picture; It is full of maps
book diary; leather, cloth, velvet; You write your secrets in it
book scrapbook; cardboard, linen, paper; It is full of things that somebody glued in
book songbook; leather, pocket, picture; It is full of tunes
book sketchbook; paper, pocket, cloth; Its pages are empty until you draw in it
book album; photo, stamp, velvet; It is full of old pictures
tool lantern; brass, paper, tin; It shines in the dark, and you can carry it
tool rope; hemp, braided, nylon; It is long, and you can tie knots in it
tool shovel; metal, tin, wooden; You dig holes with it
tool umbrella; silk, striped, polka-dot; It opens up when it rains
tool hammer; wooden, iron, steel; It hits nails on the head
tool compass; brass, silver, pocket; Its needle always points north
tool telescope; brass, pocket, folding; It makes faraway things look near
tool magnifying glass; brass, round, pocket; It makes an ant look like a horse
tool watering can; tin, copper, plastic; It makes rain for flowers
tool paintbrush; wooden, bristle, camel-hair; It wears a different color every day
tool fishing rod; bamboo, wooden, willow; It has a hook and a line
tool net; cotton, nylon, butterfly; It is made of string and holes
tool flashlight; metal, plastic, pocket; You press a button and it makes a beam of light
tool blanket; woolen, quilted, patchwork; It keeps you warm in bed
tool whisk; wire, metal, copper; It beats eggs until they foam
tool broom; straw, birch, willow; It sweeps the floor
tool ladder; wooden, folding, bamboo; It has rungs, and you climb up on it
tool pail; tin, wooden, enamel; It has a handle and carries water
tool oar; wooden, painted, maple; It helps you row
tool pencil; colored, wooden, stubby; It is pointed and leaves a gray line
tool needle case; ivory, wooden, felt; It keeps sharp little things for sewing
tool pocketknife; folding, steel, pearl; It folds up, and it is good for whittling
tool walking stick; birch, carved, oak; It is like a third leg for long walks
tool mirror; hand, silver, pocket; You see your own face in it
tool comb; tortoiseshell, wooden, bone; It has many teeth but never bites
tool alarm clock; brass, tin, windup; It has two hands and wakes you up
music drum; tin, wooden, leather; You hit it and it goes boom
music flute; wooden, silver, bamboo; You blow into it and cover the holes
music trumpet; brass, tin, toy; You blow into it and it goes toot
music whistle; tin, silver, willow; You blow into it and it is very shrill
music bell; brass, silver, copper; It goes ding-dong
music violin; wooden, varnished, spruce; It has four strings and a bow
music harmonica; silver, tin, brass; You slide it along your lips to make music
music tambourine; wooden, beaded, leather; You shake it and it jingles
music banjo; wooden, tin, five-string; You pluck its strings with your fingers
music guitar; wooden, cedar, rosewood; It has six strings and a hole in the middle
music xylophone; wooden, metal, rainbow; You tap its bars with two little sticks
music accordion; pearl, squeaky, leather; You squeeze it in and out
music ukulele; wooden, mango, koa; It has four strings and comes from an island
music triangle; steel, silver, metal; It has three sides and goes ting
music horn; brass, copper, hunting; It is curly and very loud
treasure shell; spiral, pearly, speckled; You can hear the sea in it
treasure coin; gold, copper, pirate; It is round and flat, and you can spend it
treasure feather; peacock, eagle, ostrich; A bird left it behind
treasure key; brass, iron, rusty; It opens a lock
treasure ring; silver, garnet, brass; It fits around your finger
treasure stamp; paper, postage, foreign; You lick it and stick it on a letter
treasure crystal; quartz, amethyst, rose; It grew inside a rock and it sparkles
treasure fossil; stone, fern, ammonite; It is a stone that was once alive
treasure locket; silver, gold, oval; It opens up and holds a tiny picture
treasure music box; walnut, painted, enamel; You wind it up and it plays a tune
treasure pearl; round, pink, river; An oyster made it
treasure arrowhead; flint, stone, chipped; Long ago it flew from a bow
treasure snow globe; glass, musical, round; You shake it and it snows
treasure pocket watch; silver, gold, brass; It ticks on a chain
treasure medal; bronze, tin, silver; You get it when you are very brave
treasure badge; tin, star-shaped, sheriff's; You pin it on your shirt
treasure ribbon; satin, velvet, silk; You can tie it in a bow
treasure acorn cup; polished, carved, oak; A tiny elf could drink from it
treasure figurine; porcelain, jade, carved; It is a tiny statue for a shelf
treasure brooch; amber, silver, enamel; It is a pretty pin for a coat
ride wagon; wooden, metal, rattling; It has four wheels and a handle to pull it
ride scooter; metal, folding, plastic; It has two wheels, and you push it with one foot
ride sled; wooden, birch, racing; It slides down hills
ride tricycle; metal, rusty, racing; It has three wheels and two pedals
"""


def _read_things() -> tuple[Thing, ...]:
    things = []
    for line in _THINGS.strip().splitlines():
        head, materials, riddle = (part.strip() for part in line.split(";"))
        group, _, noun = head.partition(" ")
        things.append(Thing(noun, group, phrases(materials), riddle))
    return tuple(things)


THINGS = _read_things()

# Too big for a bread box: they are never put away.
BIG = phrases("""
wagon, scooter, sled, tricycle, ladder, oar, broom, hoop, fishing rod, walking stick, accordion, guitar, drum, net
""")

SIZES = phrases("little, small, tiny, big, large")
LOOKS = phrases("""
shiny, old, new, lovely, pretty, bright, handsome, faded, fancy, plain, spotless, battered, splendid, curious
well-worn, dainty, sturdy, beautiful, dusty, precious, elegant, secondhand, antique, unusual, glossy, smooth
""")

# What falls and breaks; it can be glued again.
BREAKABLES = phrases("""
vase, teapot, bowl, plate, cup, jug, lamp, picture frame, flowerpot, teacup, sugar bowl, candlestick, mug, platter, jar
saucer, pitcher, china cat, cookie jar, glass swan, butter dish, egg cup, soup tureen, clay whistle, porcelain shepherd
""")

# --- to eat ----------------------------------------------------------------------------------------------------------
# One and many, for counting.
COUNTABLES = tuple(
    (one.strip(), many.strip())
    for one, many in (
        pair.split("/")
        for pair in phrases("""
apple/apples, pear/pears, plum/plums, peach/peaches, cherry/cherries, orange/oranges, lemon/lemons, fig/figs
strawberry/strawberries, apricot/apricots, walnut/walnuts, acorn/acorns, cookie/cookies, muffin/muffins, bun/buns
pancake/pancakes, carrot/carrots, potato/potatoes, radish/radishes, tomato/tomatoes, egg/eggs, pinecone/pinecones
shell/shells, marble/marbles, button/buttons, feather/feathers, pebble/pebbles, stamp/stamps, bead/beads
crayon/crayons, sticker/stickers, balloon/balloons, candle/candles, chestnut/chestnuts, coin/coins, ribbon/ribbons
pretzel/pretzels, cupcake/cupcakes, mushroom/mushrooms, daisy/daisies, tulip/tulips, leaf/leaves, turnip/turnips
banana/bananas, mango/mangoes, biscuit/biscuits, doughnut/doughnuts, tart/tarts, date/dates, hazelnut/hazelnuts
raspberry/raspberries, paper boat/paper boats, tin soldier/tin soldiers, gumdrop/gumdrops, peppermint/peppermints
""")
    )
)
NUMBERS = phrases("zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen")

FOOD: dict[str, tuple[str, ...]] = {
    "snack": phrases("""
        a slice of bread and jam, a cheese sandwich, a bag of nuts, a piece of apple pie, a honey cake, a juicy pear
        a handful of raisins, a warm pretzel, a buttered roll, a corn muffin, a ginger cookie, a boiled egg
        a ripe plum, a bunch of grapes, a poppy-seed bun, a bowl of berries, an oatcake, a banana, a lump of cheese
        a crisp apple, a cucumber sandwich, a blueberry scone, a bag of popcorn, a bar of chocolate, a rice ball
        a raspberry tart, a slice of melon, a cinnamon roll, an orange, a peanut butter sandwich
        a loaf of raisin bread, a jam doughnut
    """),
    "dish": phrases("""
        tomato soup, mashed potatoes, noodles with butter, roast chicken, bean stew, rice and peas, fish pie
        pea soup, scrambled eggs, baked beans, spaghetti, lentil soup, corn chowder, vegetable curry
        dumplings in broth, meatballs, pumpkin soup, carrot stew, cheese toast, stuffed peppers, macaroni
        potato pancakes, barley soup, spinach pie, grilled trout, onion tart, cabbage rolls, beet salad
        squash casserole, chili, turnip mash, leek soup, fried rice
    """),
    "sweet": phrases("""
        apple pie, plum cake, rice pudding, vanilla custard, stewed pears, cherry tart, gingerbread, honey cake, jelly
        strawberries and cream, baked apples, lemon pie, chocolate pudding, walnut bread, apricot dumplings, ice cream
        carrot cake, blueberry muffins, caramel, coconut cookies, rhubarb crumble, peach cobbler, marzipan, fudge
    """),
    "breakfast": phrases("""
        oatmeal with raisins, pancakes with syrup, toast with jam, boiled eggs, porridge with honey, waffles
        corn bread, yogurt with berries, buttered rolls, omelets, crumpets, granola, grits, French toast
        bagels with cream cheese
    """),
    "drink": phrases("""
        cold milk, apple juice, peppermint tea, hot cocoa, lemonade, warm milk, berry juice, ginger tea, spring water
        orange juice, cider, chamomile tea, buttermilk, raspberry punch, pear nectar, rosehip tea
    """),
    "morning_drink": phrases("warm milk, orange juice, hot cocoa, apple juice, peppermint tea, cold milk, plum juice"),
    "remedy": phrases("""
        a pot of chicken soup, a jar of honey, a bowl of noodle soup, a cup of ginger tea, a thermos of broth
        a lemon cake, a bunch of {flower}, a basket of oranges, a jug of elderberry juice, a bowl of rice pudding
        a warm apple bun
    """),
}

ILLNESSES = phrases("""
a bad cold, a sore throat, a fever, a cough, a tummy ache, a twisted ankle, an earache, the chicken pox, the mumps
a toothache, a stuffy nose, a sprained wrist, the flu, a headache
""")

SHOPPING = phrases("""
a loaf of bread, a pound of butter, a box of eggs, a jar of honey, a bunch of carrots, a sack of flour, a bottle of milk
a bag of onions, a ball of string, a bar of soap, a box of matches, a head of cabbage, a bag of lemons
a wheel of cheese, a spool of thread, a jar of mustard, a bag of rice, a packet of seeds, a tin of tea
a pinch of pepper, a string of garlic, a bundle of parsley, a pair of socks, a stick of cinnamon, a bag of beans
a block of chocolate, a bottle of vinegar, a cake of yeast, a pot of glue, a packet of pins, a basket of plums
a pound of sugar, a bag of walnuts, a jug of cream
""")

# --- to grow ---------------------------------------------------------------------------------------------------------
PLANTS = phrases("""
sunflower, pumpkin vine, bean plant, tomato plant, pea vine, marigold, rosebush, strawberry plant, tulip, geranium
melon vine, pepper plant, lavender bush, cucumber vine, daisy, poppy, hollyhock, squash vine, cornstalk, mint plant
morning glory, zinnia, snapdragon, blueberry bush, petunia, begonia, gourd vine, nasturtium, dahlia, foxglove, lily
""")


# --- to build: what, its three parts, how it is tried ----------------------------------------------------------------
class Build(NamedTuple):
    """Something made of three parts; the third is the one that makes it hold."""

    noun: str
    parts: tuple[str, str, str]
    failure: str
    success: str


_BUILDS = """
kite; two sticks, a sheet of paper, a long tail of rags; it spun around and crashed; it rose higher than the trees
raft; four logs, a piece of rope, a wooden pole; it tipped over with a splash; it floated as steady as a duck
birdhouse; five boards, a box of nails, a pot of glue; it fell apart; a {songbird} moved in within the hour
scarecrow; an old coat, a broomstick, a sack of straw; it flopped over; even the crows were impressed
go-cart; four wheels, a wooden crate, a strong axle; a wheel came off; it rolled all the way down the lane
tent; a bedsheet, three poles, a row of pegs; it sagged and fell on their heads; it stood up straight in the breeze
swing; a plank, two ropes, a strong hook; it came down with a bump; it carried them both up and down
lantern; a tin can, a candle, a wire handle; it dropped and went out; it glowed like a little moon
puppet theater; a cardboard box, a red curtain, two wooden braces; it folded up; it held through three shows
windmill; four paper blades, a stick, a bright pin; the blades flew off; it whirled so fast that it hummed
drum; an empty barrel, a piece of leather, a ring of rope; it only went pff; it boomed like thunder
bridge; two planks, a heap of stones, a handrail; it wobbled and slid; it carried everyone safely across
weather vane; a tin rooster, an iron rod, a can of oil; it stuck fast; it turned with every breeze
telescope; a cardboard tube, two lenses, a strip of tape; the lens fell out; the moon looked as near as a lamp
soapbox car; a soapbox, four wheels, a steering rope; it ran straight into a bush; it turned left and right
bookshelf; three planks, a handful of screws, two brackets; it leaned and toppled; it held every book they had
rabbit hutch; some wire, a wooden frame, a good latch; the door swung open; the rabbits hopped in and stayed
costume; a bedsheet, two paper wings, a row of safety pins; a wing dropped off; it looked like a real dragon
"""


def _read_builds() -> tuple[Build, ...]:
    builds = []
    for line in _BUILDS.strip().splitlines():
        noun, parts, failure, success = (part.strip() for part in line.split(";"))
        first, second, third = phrases(parts)
        builds.append(Build(noun, (first, second, third), failure, success))
    return tuple(builds)


BUILDS = _read_builds()

# --- messages --------------------------------------------------------------------------------------------------------
MESSAGES = phrases("""
The bread is in the oven
Supper is at six
The brown hen has laid an egg
The boat leaves at noon
The roof is mended
The baby has a new tooth
The choir sings on Sunday
The well is full again
The apples are ripe
The goat is in the cabbages again
The train comes an hour late
The new kittens have opened their eyes
The fair begins tomorrow
The letter from the coast has come
The soup needs more salt
The big wheel is fixed
The tea is ready at four
The snow is coming tonight
The ladder is behind the barn
The cake has three layers
The honey is ready
The gate must stay shut
The red cow has a calf
The clock is five minutes slow
""")
