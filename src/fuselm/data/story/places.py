"""Where stories happen: places with the spots in which something can lie, and the weather over them.

Data only. A spot is a whole phrase, preposition included, and is written the same way whenever it is spoken of: a thing
put "under the apple tree" is found "under the apple tree".

    place = PLACES[0]
    place.where, place.whither, place.spots[0]      # "in the garden", "to the garden", "under the apple tree"
"""

from __future__ import annotations

from typing import NamedTuple

from fuselm.data.story.words import phrases


class Place(NamedTuple):
    """A place: `outdoors` decides the weather, `spots` are where things are put and found."""

    name: str
    preposition: str
    outdoors: bool
    spots: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.preposition} the {self.name}"

    @property
    def whither(self) -> str:
        return f"{'up' if self.name == 'hill' else 'to'} the {self.name}"


# Preposition and name of a place, then its spots, without "the". An indented line goes on with the one above.
INDOORS = """
in kitchen: in bread box, under stove, behind flour jar, on spice rack, in soup pot, beside kettle
in attic: in old trunk, behind rocking chair, under dusty quilt, on rafters, inside hatbox, beside skylight
in nursery: under crib, in toy chest, behind curtain, on changing table, beside dollhouse, in laundry hamper
in library: behind atlas, on top shelf, under reading lamp, in desk drawer, beside globe, inside card cabinet
in workshop: in toolbox, under workbench, behind paint cans, on peg by the door, inside sawdust bin, beside vise
in bakery: in flour bin, under counter, behind cookie tins, on cooling rack, beside oven, inside cash box
in cellar: behind pickle jars, under stairs, in coal scuttle, on wine rack, beside potato sacks, inside barrel
in classroom: in supply closet, under teacher's desk, behind chalkboard, on windowsill, inside piano bench,
  beside coat hooks
in toy shop: behind train set, under cash register, in shop window, on puppet stage, inside drum display,
  beside rocking horse
in barn: in hayloft, under wagon, behind milk cans, on saddle hook, inside feed bucket, beside stall door
in greenhouse: under fern, behind watering cans, in clay pot, on potting bench, inside seed drawer,
  beside cactus
in tree house: under rope ladder, in spyglass case, behind flag, on crooked shelf, inside biscuit tin,
  beside trapdoor
in living room: under sofa, behind clock, in sewing basket, on mantelpiece, inside umbrella stand,
  beside fireplace
in garage: in tire stack, under workbench, behind rakes, on sled, inside cardboard box, beside bicycle pump
in museum: behind suit of armor, under whale skeleton, in glass case, on marble steps, beside mummy,
  inside cloakroom
in theater: behind velvet curtain, under front row, in costume trunk, on stage, inside prompter's box,
  beside spotlight
in post office: in parcel bin, under scales, behind stamp machine, on sorting table, inside mail sack,
  beside letter slot
in cabin: in woodbox, under bunk, behind stove pipe, on antler rack, inside oatmeal tin, beside snowshoes
in laundry room: in washtub, under ironing board, behind soap flakes, on drying line, inside linen cupboard,
  beside mangle
in hallway: under doormat, behind grandfather clock, in boot box, on coat rack, beside radiator,
  inside letter tray
in gymnasium: under bleachers, behind scoreboard, in ball bin, on balance beam, inside locker,
  beside climbing rope
in inn: under staircase, in guest book drawer, behind bar, on luggage cart, inside key cabinet, beside jukebox
"""
OUTDOORS = """
in garden: under apple tree, in wheelbarrow, behind shed, on stone wall, inside flowerpot, beside birdbath
at beach: under blue umbrella, in sandcastle, behind lifeguard chair, on flat rock, inside picnic hamper,
  beside rowboat
in forest: in hollow log, under tallest pine, behind mossy boulder, on tree stump, inside fox hole, beside brook
on farm: behind tractor, under water trough, in chicken coop, on fence post, inside grain silo, beside scarecrow
in park: under green bench, in sandbox, behind fountain, on bandstand, inside hollow statue, beside duck pond
at market: under cheese stall, in pickle barrel, behind fish cart, on melon table, inside egg crate,
  beside town pump
by river: under wooden bridge, in reeds, behind beaver dam, on stepping stone, inside old canoe,
  beside ferry bell
by pond: under lily pads, in tall grass, behind cattails, on little dock, inside duck house,
  beside drooping willow
on hill: under lone oak, in rabbit hole, behind windmill, on big boulder, inside stone hut, beside flagpole
in meadow: in clover patch, under hawthorn bush, behind haystack, on anthill, inside hollow fence post,
  beside brook
in village: behind church, under market cross, in well bucket, on bakery steps, inside bell tower,
  beside mailbox
at harbor: in lobster trap, under fishing net, behind anchor, on gangplank, inside lifeboat, beside lamppost
in orchard: under pear tree, in fruit crate, behind ladder, on lowest branch, inside cider press, beside beehive
at castle: in moat boat, under drawbridge, behind throne, on tower stairs, inside cannon, beside rusty gate
at camp: in canoe, under blue tent, behind woodpile, on picnic table, inside sleeping bag, beside campfire
on playground: under slide, in sandpit, behind swings, on seesaw, inside tunnel, beside jungle gym
at train station: under big clock, in luggage cart, behind ticket booth, on platform bench, inside waiting room,
  beside signal box
in backyard: in doghouse, under porch, behind clothesline, on swing, inside rain barrel, beside compost heap
at old mill: under millstone, in grain sack, behind water wheel, on loft ladder, inside flour chest,
  beside sluice
at lighthouse: under spiral stairs, in oil can, behind foghorn, on railing, inside keeper's coat,
  beside great lamp
in valley: in shepherd's hut, under stone arch, behind waterfall, on flat boulder, inside badger hole,
  beside footpath
at lake: under pier, in fishing basket, behind boathouse, on raft, inside kayak, beside diving board
in pumpkin field: under biggest pumpkin, in hay wagon, behind scarecrow, on gatepost, inside seed bag,
  beside ditch
at fair: under carousel, in popcorn cart, behind puppet booth, on prize shelf, inside balloon tent,
  beside Ferris wheel
in town square: under clock tower, in flower cart, behind statue, on town hall steps, inside phone booth,
  beside fountain
at zoo: behind monkey cage, under elephant shelter, in feed bucket, on turtle rock, inside parrot house,
  beside seal pool
in vineyard: under grape arbor, in harvest basket, behind stone shed, on wooden cart, inside empty cask,
  beside sundial
in schoolyard: under maple tree, in lost-and-found box, behind gym, on front steps, inside bike shed,
  beside flagpole
on island: under palm tree, in tide pool, behind sand dune, on coral rock, inside shipwreck, beside coconut pile
in rose garden: under trellis, in marble urn, behind hedge, on garden bench, inside gazebo, beside gravel path
"""


def _read(table: str, outdoors: bool) -> tuple[Place, ...]:
    places = []
    for line in table.replace("\n  ", " ").strip().splitlines():
        head, _, spots = line.partition(": ")
        preposition, _, name = head.partition(" ")
        places.append(
            Place(name, preposition, outdoors, tuple(spot.replace(" ", " the ", 1) for spot in phrases(spots)))
        )
    return tuple(places)


INDOOR_PLACES = _read(INDOORS, outdoors=False)
OUTDOOR_PLACES = _read(OUTDOORS, outdoors=True)
PLACES = INDOOR_PLACES + OUTDOOR_PLACES

FROM = {"in": "out of", "inside": "out of", "on": "from", "under": "from under", "behind": "from behind"}
FROM["beside"] = "from beside"


def out_of(spot: str) -> str:
    """'under the bench' -> 'from under the bench': where a thing comes from that was there."""
    preposition, _, rest = spot.partition(" ")
    return f"{FROM[preposition]} {rest}"


# --- weather ---------------------------------------------------------------------------------------------------------
# The sky of a story stays the same all day. Each has adjectives for "one ... morning" and remarks. Rain, storm and snow
# are seen from a window: nobody of ours stands about in them.

OUTDOOR_SKIES = ("sunny", "windy", "cloudy", "misty", "warm", "cool")
INDOOR_SKIES = ("sunny", "windy", "cloudy", "warm", "rainy", "stormy", "snowy")

SKY_ADJECTIVES = {
    "sunny": ("sunny", "bright", "golden", "sparkling", "cloudless", "sunlit"),
    "windy": ("windy", "breezy", "blustery", "gusty"),
    "cloudy": ("cloudy", "gray", "overcast", "dull"),
    "misty": ("misty", "foggy", "hazy", "dewy"),
    "warm": ("warm", "mild", "balmy", "drowsy"),
    "cool": ("cool", "crisp", "chilly", "fresh"),
    "rainy": ("rainy", "wet", "drizzly", "soggy"),
    "stormy": ("stormy", "thundery", "wild"),
    "snowy": ("snowy", "frosty", "wintry", "icy"),
}

SKY_REMARKS = {
    "sunny": phrases("""
        The sun was [shining|high and bright] and there was not a cloud in the sky.;
        Sunlight sparkled on [every leaf|every window|the rooftops].;
        The sky was as blue as {a_blue}.;
        The sunshine made [long|bright] stripes on the wall.;
        It was the kind of day that makes you want to [sing|whistle|skip].;
    """),
    "windy": phrases("""
        The wind [whistled|howled|hummed] and chased the [leaves|clouds|paper scraps] around.;
        A gust of wind [rattled the shutters|made the treetops dance|stole somebody's hat].;
        The weather vane spun [round and round|like a top].;
        Flags flapped and doors banged in the wind.;
    """),
    "cloudy": phrases("""
        The clouds hung low, like [gray wool|a soft blanket|dirty pillows].;
        One cloud looked like {a_tale_who}, and another like {a_tale_adj} {beast}.;
        The sun peeked out [only once|now and then] between the clouds.;
        Fat gray clouds drifted over the rooftops.;
    """),
    "misty": phrases("""
        The mist made everything look [soft|strange|like a dream].;
        Drops of dew hung on the [spiderwebs|grass|fence].;
        Far-off {tree} trees looked like gray ghosts in the mist.;
        Little by little the fog [lifted|thinned|melted away].;
    """),
    "warm": phrases("""
        The air smelled of [warm hay|honey|dry grass|{flower}].;
        It was so warm that even the {bug} [moved slowly|looked sleepy].;
        A soft breeze carried the smell of {flower}.;
        Somewhere [bees hummed|a lawn mower purred|a hammock creaked] in the warm air.;
    """),
    "cool": phrases("""
        The air was cool and smelled of [pine|apples|damp earth].;
        It was just chilly enough for a [scarf|sweater|woolly hat].;
        Leaves crunched and [crackled|rustled] in the cool air.;
        Everyone's breath made small white puffs.;
    """),
    "rainy": phrases("""
        Outside, the rain [drummed on the roof|ran down the windows|filled the gutters].;
        Raindrops raced each other down the glass.;
        The puddles outside grew [wider and wider|as big as ponds].;
        Drip, drip, drip went the [gutter|old roof].;
    """),
    "stormy": phrases("""
        Outside, thunder [rumbled|grumbled] and the trees bent low.;
        Lightning flashed, and the windows [rattled|shook].;
        The storm [roared like a lion|sounded like a hundred drums] outside.;
    """),
    "snowy": phrases("""
        Outside, snowflakes [tumbled|floated|danced] past the window.;
        The whole [street|yard|world] outside was white and quiet.;
        Icicles [glittered|hung like teeth] along the roof.;
        Frost had drawn [ferns|stars|feathers] on the windowpane.;
    """),
}
