"""Who is in the stories, and the grammar of passing remarks: names, kinds, and lists of words and phrases.

Data only; what places and things there are is in places.py and things.py, and how a phrase is chosen and
filled in world.py. An entry of GRAMMAR may name other entries in braces, `{a_bird}` standing for a bird with its
article, and may hold alternatives in brackets: `[early|late] in the {season}`.

    GRAMMAR["bird"]     # ("robin", "wren", ...)
"""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """Words with spaces between them."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Comma- or newline-separated phrases; a phrase that needs a comma is a line that ends with a semicolon."""
    found: list[str] = []
    for line in text.strip().splitlines():
        line = line.strip()
        found += [line[:-1]] if line.endswith(";") else [part.strip() for part in line.split(",") if part.strip()]
    return tuple(found)


# --- who -------------------------------------------------------------------------------------------------------------
# A name always has the same pronoun, and none ends in s, so that a possessive is always 's.

GIRLS = words("""
Ada Alice Amara Amy Anna Anya Aria Astrid Ava Bella Beth Bonnie Cara Carla Celia Chloe Clara Cora Daisy Dana Daria
Delia Dina Edith Elena Elise Ella Elsa Emma Erin Esme Eva Fatima Faye Fiona Flora Freya Gemma Gina Greta Gwen Hana
Hazel Heidi Helen Holly Ida Ingrid Irene Isla Ivy Jada Jane Jenna Jill Joan Josie Judy Julia June Kara Kate Kira Lara
Laura Leah Lena Lila Lily Lina Lola Lotta Lucy Luna Mara Maria Marta Maya Mei Mia Mila Mina Molly Nadia Nancy Nell Nina
Nora Olga Olive Paula Pearl Petra Polly Priya Rita Rosa Ruby Ruth Sadie Sally Sara Selma Sofia Stella Susan Tara Tessa
Thea Tina Uma Vera Viola Wanda Wendy Willa Yara Yuki Zara Zoe
""")
BOYS = words("""
Aaron Abel Adam Aidan Alan Albert Alvin Amir Andrew Anton Arlo Arthur Ben Bram Brian Bruno Caleb Calvin Carl Casper
Charlie Cody Conrad Dan Daniel David Dean Dexter Diego Dylan Eddie Edgar Edwin Eli Elliot Emil Eric Ethan Ezra Felix
Finn Frank Fred Gabriel George Gordon Hank Harry Hassan Hector Henry Hugo Ian Igor Isaac Ivan Jack Jacob Jamal Jasper
Joel John Jonah Jordan Joseph Juan Kai Karl Kenji Kevin Kofi Kurt Lenny Leo Leon Liam Logan Luca Luke Malik Marco Martin
Matteo Max Milo Nathan Ned Neil Noah Nolan Olaf Oliver Omar Oscar Otto Owen Paul Pedro Peter Philip Rafi Ralph Ravi
Raymond Robert Roland Rory Sam Samuel Sanjay Saul Sean Simon Stefan Sven Ted Theo Tim Toby Tom Tony Umar Victor Vincent
Walter Wesley Yusuf Zack
""")
SHE_CREATURES = words("""
Biscuit Blossom Buttercup Cinnamon Clover Cookie Dot Dumpling Fern Ginger Jelly Kiki Lulu Maple Marigold Mimi Misty
Muffin Nutmeg Pebble Penny Pepper Petal Pippa Poppy Sprinkle Suki Tansy Tilly Trixie Velvet Willow
""")
HE_CREATURES = words("""
Barley Bobo Bramble Bumble Button Chip Digger Domino Dusty Fidget Flicker Fudge Grumble Hopper Jingo Kip Mumble Nibble
Patch Pickle Pip Pogo Puddle Rascal Rusty Scout Skip Smudge Snuffle Spud Squeak Tickle Toffee Tumble Waddle Wiggle Ziggy
""")

ANIMALS = phrases("""
fox, rabbit, bear, mouse, hedgehog, squirrel, badger, otter, beaver, mole, frog, duck, goose, owl, crow, goat
lamb, pony, donkey, calf, piglet, puppy, kitten, cat, dog, turtle, tortoise, raccoon, skunk, chipmunk, fawn, moose
lion cub, elephant, monkey, giraffe, zebra, koala, kangaroo, panda, penguin, seal, hippo, camel, lizard, hamster
ferret, hare, porcupine, parrot, pigeon, llama, alpaca, sloth, armadillo, meerkat, lemur, bunny, pig, sheep, wombat
chick
""")
SMALL_ANIMALS = phrases("mouse, frog, chick, hamster, chipmunk, mole, shrew, wren, gecko, sparrow, duckling, vole")
TOYS = phrases("""
rag doll, teddy bear, tin soldier, clockwork mouse, toy robot, cloth elephant, wooden puppet, sock monkey, knitted lamb
velvet rabbit, paper dragon, tin knight, nutcracker, patchwork dog, plush penguin, windup frog, straw doll
""")

# Elders speak, lend and console; their names stand without an article.
CHILD_ELDERS = {
    "she": phrases("""
        Mama, Mom, Mother, Grandma, Granny, Nana, Aunt Rose, Aunt Bee, Aunt Martha, Miss Hill, Miss Brook, Miss Winter
        Great-Aunt Pru, Aunt Clementine
    """),
    "he": phrases("""
        Papa, Dad, Father, Grandpa, Granddad, Uncle Joe, Uncle Bert, Uncle Salim, Farmer Brown, Captain Stone
        Baker Lund, Great-Uncle Mort, Uncle Vern
    """),
}
ANIMAL_ELDERS = {
    "she": phrases("Mama, Mother, Grandma, Granny, Old Owl, Aunt Rose, Mother Goose, Old Tortoise, Granny Hare"),
    "he": phrases("Papa, Father, Grandpa, Uncle Bert, Old Badger, Old Toad, Uncle Heron, Grandpa Stag, Old Raven"),
}
TOY_ELDERS = {
    "she": phrases("Old Bear, Granny Button, Madam Teapot, Queen Velvet, Aunt Calico"),
    "he": phrases("Captain Tin, Old Drummer, Grandpa Clock, General Cork, Uncle Marble"),
}

# --- how they are ----------------------------------------------------------------------------------------------------
# Traits that no plot contradicts: who is brave, patient, honest or generous is for the plots to say.

GRAMMAR: dict[str, tuple[str, ...]] = {
    "trait": words("""
        curious cheerful gentle lively friendly thoughtful busy clever merry quiet polite playful dreamy hopeful sunny
        bright bouncy chatty giggly musical neat nimble bubbly lovely jolly spirited bashful restless wide-eyed
        sweet-tempered rosy-cheeked sleepy-eyed imaginative inventive observant sprightly peppy sensible good-natured
    """),
    "happy": words("happy glad delighted joyful pleased thrilled excited proud surprised"),
    "glad": phrases("""
        happy, glad, cheerful, delighted, joyful, pleased, thrilled, merry, overjoyed, content, as happy as could be
        as pleased as {a_songbird}, full of joy, over the moon, tickled pink
    """),
    "sad": words("sad unhappy gloomy miserable downhearted glum upset tearful heavy-hearted"),
    "snap": words("snap crack crunch pop rip twang"),
    "scared": words("scared frightened afraid nervous shaky uneasy alarmed"),
    "cross": words("cross angry grumpy annoyed sulky grouchy furious huffy"),
    "tired": words("tired sleepy weary drowsy worn-out"),
    "softly": words("softly gently quietly kindly warmly tenderly calmly patiently sweetly"),
    "loudly": words("loudly proudly eagerly excitedly cheerfully happily brightly boldly breathlessly"),
    "sadly": words("sadly glumly miserably gloomily sorrowfully tearfully bitterly"),
    "carefully": words("carefully slowly gently neatly thoughtfully patiently cautiously steadily"),
    "quickly": words("quickly swiftly hurriedly briskly speedily promptly hastily"),
    "said": words("said said said said answered replied"),
    "cried": words("cried shouted called exclaimed yelled"),
    "cheered": words("cried shouted cheered exclaimed laughed whooped sang"),
    "whispered": words("whispered murmured mumbled breathed"),
    "hurried": words("hurried ran dashed rushed raced scampered hastened trotted scurried sprinted bolted"),
    "strolled": words("strolled wandered walked skipped ambled marched sauntered tiptoed hopped rambled trudged"),
    "smiled": phrases("""
        smiled, grinned, beamed, laughed, nodded, chuckled, giggled, gave a little bow, clapped softly, winked
        blushed with pride
    """),
    "nice": words("lovely splendid wonderful marvelous beautiful charming delightful pleasant grand fine glorious"),
    "wow": phrases("""
        Oh my, Oh, Hooray, Goodness, Goodness me, Look at that, My stars, Well I never, Hurrah, Yippee, Oh joy, Golly
        Heavens, Good gracious, Wow, Whoopee
    """),
    "alas": phrases("Oh no, Oh dear, Dear me, Oh bother, Uh-oh, Goodness, Good grief, Drat, Fiddlesticks"),
    "praise": phrases("""
        Well done, How clever of you, Good for you, What a helper you are, I am proud of you, You did it, Bravo
        Good work, I knew that you could do it, You make me proud, Splendid work, That was well done
    """),
    "sound": words("""
        thump splash crash clang rattle bump boom plop clatter swish crackle creak whoosh ping thud rustle squelch
        clunk jingle twang pop fizz click clack tinkle rumble
    """),
    "gift_day": phrases("birthday, birthday, birthday, name day, first recital, first day of school"),
    "crash": words("crash clatter smash clink bang clang tinkle crack"),
    "blue": phrases("cornflower, jay's wing, robin's egg, sapphire, new bowl, sailor's jacket, forget-me-not"),
    # --- things that pass by ---------------------------------------------------------------------------------------
    "songbird": words("lark robin wren finch thrush nightingale canary bluebird goldfinch warbler linnet starling"),
    "bird": words("""
        robin wren finch thrush magpie jay swallow cuckoo woodpecker blackbird sparrow pigeon dove heron stork gull
        goldfinch kingfisher lapwing swift starling crane hawk falcon eagle pelican cormorant swan quail pheasant
        nuthatch chickadee cardinal plover sandpiper
    """),
    "bug": words("""
        butterfly ladybug bumblebee dragonfly beetle grasshopper cricket moth caterpillar spider ant firefly snail
        earthworm honeybee mayfly centipede earwig cicada
    """),
    "beast": words("""
        fox hare hedgehog squirrel badger otter weasel vole shrew stoat deer newt salamander toad tomcat terrier
        spaniel sheepdog mule heifer ram billy-goat gander piglet foal raccoon opossum tortoise poodle greyhound
        bulldog beagle collie lizard marmot gopher rooster
    """),
    "crept": phrases("""
        crept past, trotted by, hurried by, wandered past, slipped through the grass, peeked around the corner
        stopped to sniff the air, yawned and stretched, scratched its ear, blinked in the light, shook its paws
        darted across the path, curled up for a nap, wriggled under a fence, chewed on a straw, rolled in the dust
    """),
    "flew": phrases("""
        flew overhead, circled twice, landed on a branch, sang three notes, flapped its wings, pecked at a crumb
        tilted its head, hopped along a fence, glided past, settled on a roof, preened its feathers, chirped a greeting
        splashed in a puddle, perched on a post, swooped low, fluttered away, warbled a tune
    """),
    "buzzed": phrases("""
        crawled along a leaf, landed on {his} nose, hid under a petal, rested on a twig, climbed a blade of grass
        wiggled its feelers, sat on a daisy, tickled {his} hand, zigzagged past, rested on a windowsill
        crossed a pebble
    """),
    "tree": words("""
        oak elm maple birch willow pine fir ash beech cedar chestnut poplar hazel larch spruce walnut sycamore hawthorn
        rowan hickory cypress juniper magnolia mulberry
    """),
    "flower": words("""
        daisies tulips roses violets poppies daffodils lilies bluebells buttercups marigolds pansies snowdrops
        primroses sunflowers peonies crocuses irises petunias dandelions hyacinths carnations geraniums lupins asters
        foxgloves honeysuckles zinnias begonias orchids
    """),
    "color": words("""
        red blue green yellow orange purple pink brown white black gray silver golden scarlet crimson violet turquoise
        lavender emerald cream ivory navy lilac tan coral
    """),
    # --- who passes by, doing what ---------------------------------------------------------------------------------
    "worker": phrases("""
        a baker with a tray of {pastry}, a mail carrier with a bulging sack, a fisherman with a dripping net
        a gardener pushing a mower, a painter on a tall ladder, a fiddler playing a jig, a shepherd with three sheep
        a chimney sweep black with soot, a clown on stilts, a tailor measuring a sleeve, a carpenter sawing a plank
        a blacksmith hammering a horseshoe, a milkmaid with two pails, a juggler tossing {tale_what}
        a sailor coiling a rope, a miner with a lamp on a helmet, a drummer beating a march
        a plumber with a long pipe, a beekeeper in a veil, a knight in rusty armor
        a nurse with a basket of bandages, a cobbler tapping at a boot, a librarian balancing a stack of books
        a dancer twirling a ribbon, a cook stirring a steaming pot, a street musician squeezing an accordion
        a photographer behind a camera, a lamplighter with a long pole, a potter with clay up to the elbows
        a weaver at a loom, a peddler ringing a handbell, a farmer on a tractor, a miller white with flour
        a nanny pushing a carriage, a conductor punching tickets, a judge in a curly wig
        a firefighter unrolling a hose, a diver in rubber flippers, a skater tracing circles
        a poet scribbling verses, a barber sharpening scissors, a mountaineer tying knots
        a cyclist pumping up a tire, a magician shuffling cards, an astronomer polishing a telescope
        a hatter carrying nine hats, a jeweler squinting at a pearl, a trumpeter puffing out both cheeks
        a ferryman leaning on an oar, a mason stacking bricks, a window cleaner with a squeaky sponge
        a newspaper seller shouting the headlines, a florist tying bouquets, a bride with a lace veil
        two twins in matching sweaters, a scientist with bubbling bottles, an acrobat
        a basket weaver splitting willow twigs, a rider on a spotted horse, a swimmer drying off with a towel
    """),
    "pastry": words("""
        buns rolls pies tarts muffins scones bagels pretzels croissants biscuits waffles doughnuts dumplings turnovers
        flapjacks crumpets eclairs loaves
    """),
    # --- silly tales: dreams, songs and books are where the rarer words live -----------------------------------------
    "tale_who": phrases("""
        walrus, dragon, giant, queen, king, princess, prince, knight, wizard, mermaid, pirate, goblin, troll, fairy
        witch, robot, ghost, duke, duchess, emperor, sultan, sailor, captain, shepherd, tailor, hermit, butler
        inventor, explorer, detective, astronaut, jester, monk, gnome, elf, ogre, unicorn, phoenix, whale, octopus
        lobster, crab, jellyfish, dolphin, shark, squid, flamingo, ostrich, vulture, pelican, gorilla, baboon
        chimpanzee, rhinoceros, buffalo, leopard, tiger, cheetah, jaguar, panther, hyena, jackal, antelope, gazelle
        bison, reindeer, polar bear, crocodile, alligator, cobra, python, chameleon, iguana, tarantula, scorpion
        mosquito, beetle, caterpillar, snowman, scarecrow, statue, teacher, dentist, plumber, mayor, cowboy
        giantess, milkmaid, sorcerer, snail, professor, opera singer, tuba player
    """),
    "tale_adj": words("""
        tiny enormous lonely greedy sleepy purple clumsy forgetful invisible polite bearded ticklish grumpy gigantic
        barefoot mysterious wrinkled fearless fancy lazy absent-minded dizzy stubborn elegant wobbly ancient freckled
        homesick peculiar ridiculous sneezing snoring dancing whistling singing flying spotted striped hairy bald
        famous royal secret magical lucky unlucky hungry thirsty drowsy timid mighty gallant
    """),
    "tale_did": phrases("""
        painted, juggled, collected, counted, polished, sold, borrowed, washed, carried, dropped, mended, dusted
        stacked, buried, balanced, traded, licked, sniffed, sorted, wrapped, measured, weighed, kicked, tickled
        hugged, admired, guarded, delivered, rescued, chased, stitched, ironed, scrubbed, whispered to, sang to
        shouted at, danced with, argued with, waltzed with, hid, found, lost, gathered, tossed, threw, caught
        dragged, rolled, planted, watered, nibbled, swallowed, sketched, decorated, tamed, invented, repaired
        discovered, followed, worshiped, dreamed of, wrote to, built castles out of, slept on, sailed away with
        tiptoed around, jumped over, inspected, sprinkled, smuggled, glued, carved, hatched, saluted, bowed to
        conducted, photographed, tasted, wrestled with, shrank, mailed
    """),
    "tale_what": phrases("""
        teapots, umbrellas, pancakes, bicycles, pillows, trumpets, bathtubs, mittens, ladders, mushrooms, candles
        cabbages, suitcases, violins, helmets, lanterns, pajamas, balloons, marbles, anchors, feathers, wagons
        turnips, spoons, slippers, kites, crowns, chimneys, pickles, postcards, noodles, snowballs, thimbles
        barrels, clocks, cupcakes, cushions, doorbells, drums, earmuffs, fishbowls, flutes, footprints, gloves
        hammers, hammocks, handkerchiefs, icicles, jackets, kettles, keys, lemons, magnets, mirrors, mustaches
        necklaces, oranges, paintbrushes, pebbles, pencils, pianos, pinecones, pineapples, pitchforks, potatoes
        puddings, pumpkins, puzzles, radishes, raincoats, riddles, rockets, saddles, sandwiches, scarves, seashells
        shadows, shovels, skates, snowflakes, socks, spaceships, stamps, stars, stockings, suspenders, sweaters
        swords, tambourines, telescopes, thunderclouds, toothbrushes, trombones, tulips, typewriters, unicycles
        waffles, walnuts, watermelons, whistles, wigs, windmills, xylophones, yo-yos, zippers, moons, rainbows
        volcanoes, icebergs, submarines, dictionaries, cactuses, bananas, coconuts, doorknobs, meatballs, jellybeans
        parachutes, tricycles, trousers, petticoats, monocles, buttons, cobwebs, bagpipes, banjos, tortoises
        eggshells, pearls, bubbles, mountains, bookcases, wheelbarrows, croquet balls, chandeliers, boomerangs
        catapults, dominoes, echoes
    """),
    "tale": (
        "{a_tale_adj} {tale_who} who {tale_did} {tale_what}",
        "{a_tale_who} who {tale_did} {tale_adj} {tale_what}",
        "{a_tale_adj} {tale_who} and {a_tale_adj} {tale_who} who {tale_did} {tale_what}",
        "{a_tale_who} who {tale_did} {tale_what} [every Sunday|every night|at midnight|on the moon|under the sea]",
    ),
    # --- pastimes and chores -----------------------------------------------------------------------------------------
    "hobby": phrases("""
        hum old tunes, collect acorns, draw maps, watch the clouds, count the stars, ask questions, make up rhymes
        whistle, jump over puddles, build towers, listen to stories, climb trees, look for feathers, dance in the rain
        follow snail trails, skip stones, press flowers, sort buttons, paint pictures, fold paper boats, solve riddles
        tell jokes, dig for treasure, chase butterflies, roll down hills, explore, invent machines, sew tiny clothes
        play the drum, read about faraway lands, bang on pots, imitate birds, gather seashells, splash in streams
        carve little animals, weave baskets, make mud pies, write letters, put on puppet shows, learn magic tricks
        sing loudly, plan adventures, feed the ducks, study ants, walk on tiptoe, spin until dizzy, wear silly hats
        make daisy chains, practice cartwheels, pretend to be a pirate, catch falling leaves, tie fancy knots
        juggle pinecones, dress up in capes, name every cloud, balance on logs, make friends
    """),
    "game": phrases("""
        playing tag, playing hopscotch, skipping rope, building towers, flying paper planes, blowing bubbles
        turning cartwheels, playing leapfrog, rolling hoops, playing marbles, chasing shadows, jumping in leaves
        playing pirates, playing hide-and-seek, telling riddles, making funny faces, throwing pinecones
        playing catch, balancing on one leg, drawing with chalk, playing statues, galloping like horses
        sailing twigs, playing charades, pretending to be knights, playing checkers, tossing beanbags
        walking backward, playing dominoes, building a fort, having a whistling contest, spinning like tops
        digging tunnels, playing cards
    """),
    "chore": phrases("""
        feed the hens, sweep the porch, fold the towels, set the table, peel the carrots, stack the firewood
        shell the peas, wash the dishes, water the tomatoes, carry in the groceries, rake the leaves
        knead the dough, hang up the laundry, dust the bookshelf, stir the soup, polish the spoons, gather the eggs
        brush the dog, wind the wool, sort the socks, mash the potatoes, shake out the rugs, mop the floor
        fetch the milk, weed the flower bed, fill the bird feeder, scrub the pots, butter the toast, beat the carpet
        clean the windows, wipe the counter, tidy the pantry
    """),
    "toy_chore": phrases("""
        dust the shelf, wind the clock, polish the buttons, straighten the ribbons, stack the blocks, sort the marbles
        count the crayons, sweep up the sawdust, oil the little wheels, untangle the strings, line up the soldiers
        brush the rocking horse, roll up the yarn, fold the doll blankets
    """),
    "junk": phrases("""
        a dusty button, an old sock, a sleepy beetle, a broken pencil, a dry leaf, a bent spoon, a ball of fluff
        a cobweb, a rusty nail, a crumpled ticket, a single glove, a lost penny, an empty jar, a cork
        a piece of string, a snail, an old newspaper, a candle stub, a torn map, a cracked cup, a pine needle
        a crust of bread, a bottle cap, a chewed slipper, a paper clip, a faded postcard, a tangle of wire, a marble
        a hairpin, a shoelace, a walnut shell, a moth, a heap of dust, a toothpick, a wad of paper
        a splinter of wood, a curious spider, a wooden peg, a feather
    """),
    "reason": phrases("""
        the parade, the show, a long trip, the school play, a visit to the seaside, the big contest, the lantern walk
        the summer fair, a surprise, a special dance, a photograph, the village feast, the spring festival, a concert
    """),
    "dwelling": phrases("""
        a yellow house by the sea, a cottage with a crooked chimney, an apartment above the bakery
        a farmhouse on a hill, a brick house with green shutters, a houseboat on the canal
        a cabin at the edge of the woods, a tall narrow house, a village between two mountains
        a town with a clock tower, a stone house near the mill, a white house on Elm Street, a cozy bungalow
        a windmill, a little room over the shoe store, a city full of bridges, a lighthouse keeper's cottage
    """),
    "den": phrases("""
        a burrow under an old oak, a snug hollow log, a mossy den by the brook, a nest of dry leaves
        a hut made of twigs, a cave behind a waterfall, a little house under the roots of a willow
        a clearing deep in the forest, a hole in the riverbank, an old barn full of hay, a thicket of brambles
        a cottage built of pebbles, a hollow stump
    """),
    "home_child": ("in {dwelling}",),
    "home_animal": ("in {den}",),
    "home_toy": phrases("""
        on the top shelf of a playroom, in a big toy box, in the window of a toy shop, in a dollhouse in the attic
        in a nursery cupboard, in a basket beside a bed, in the corner of a schoolroom, in a trunk with brass hinges
        on the lid of an old piano
    """),
    "simile": phrases("""
        as proud as a peacock, as light as a feather, as merry as a cricket, as happy as a lark, as free as a bird
        as quick as lightning, as bright as a penny, as fresh as a daisy, as jolly as a jester, as brisk as a bee
    """),
    "skill": phrases("""
        whistle with two fingers, walk on stilts, fold paper cranes, juggle three pinecones, stand on one hand
        tie a sailor's knot, call owls, braid grass bracelets, play a tune on a leaf, wiggle both ears, draw horses
        skip stones all the way across, count to ten in six languages, make shadow animals, hum and whistle at once
        build a castle out of cards, do a backward somersault, yodel, carve a whistle from a twig, make paper flowers
        throw a boomerang, balance a spoon on the nose, tell the time by the sun, speak in rhymes, dance the polka
    """),
    "round_thing": words("teapot boot cabbage pumpkin lantern melon kettle loaf cushion"),
    "seller": phrases("""
        a baker, a farmer, a woman with a red shawl, a man with a long beard, a peddler, a grocer, a farmer's wife
        a boy behind a tall counter, an old sailor, a girl in an apron, a merchant, a shopkeeper with round glasses
        a lady with silver earrings, a gruff man in rubber boots
    """),
    "spree": phrases("""
        the circus, the puppet show, the swimming hole, the ice cream stand, the kite contest, the frog race
        the parade, the candy shop, the boat race, the band concert, the magic show, the toy fair, the flea market
        the pony rides, the pie contest, the maze, the haunted house, the bonfire, the skating rink, the aquarium
    """),
    "pieces": words("three four five six seven nine twenty"),
    "weekday": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
}
