"""What scenes are made of: COCO categories with their nouns and sprites, colors, and places with their habits.

A place's `core` objects are nearly always there and its `common` ones often: this skew is the language prior that the
embedded model learns. Every noun is one word and a CHAIR synonym of its category, so that the lens can read it from a
single token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Category:
    """A COCO category as scenes draw and name it; `sprite` is a Twemoji code point, or `draw:` and a shape of ours."""

    id: int
    name: str
    noun: str
    plural: str
    sprite: str
    large: bool = False
    tintable: bool = False
    mass: bool = False  # named with "some" instead of an article

    @property
    def always_plural(self) -> bool:
        """Whether even one takes "are", as scissors do."""
        return self.mass and self.noun == self.plural and self.noun.endswith("s")

    @property
    def phrase(self) -> str:
        """The noun with its determiner: "a dog", "an apple", "some scissors"."""
        if self.mass:
            return f"some {self.noun}"
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


def _c(id: int, name: str, sprite: str, noun: str = "", plural: str = "", kind: str = "") -> Category:
    noun = noun or name
    return Category(id, name, noun, plural or noun + "s", sprite, "L" in kind, "T" in kind, "M" in kind)


CATEGORIES: tuple[Category, ...] = (
    _c(1, "person", "1f9cd", plural="people", kind="L"),
    _c(2, "bicycle", "1f6b2", kind="LT"),
    _c(3, "car", "1f697", kind="LT"),
    _c(4, "motorcycle", "1f3cd", kind="L"),
    _c(5, "airplane", "2708", kind="L"),
    _c(6, "bus", "1f68c", plural="buses", kind="LT"),
    _c(7, "train", "1f682", kind="L"),
    _c(8, "truck", "1f69a", kind="LT"),
    _c(9, "boat", "26f5", kind="LT"),
    _c(10, "traffic light", "1f6a6", "stoplight"),
    _c(15, "bench", "draw:bench", plural="benches", kind="L"),
    _c(16, "bird", "1f426"),
    _c(17, "cat", "1f408"),
    _c(18, "dog", "1f415"),
    _c(19, "horse", "1f40e", kind="L"),
    _c(20, "sheep", "1f411", plural="sheep", kind="L"),
    _c(21, "cow", "1f404", kind="L"),
    _c(22, "elephant", "1f418", kind="L"),
    _c(23, "bear", "1f43b", kind="L"),
    _c(24, "zebra", "1f993", kind="L"),
    _c(25, "giraffe", "1f992", kind="L"),
    _c(27, "backpack", "1f392", kind="T"),
    _c(28, "umbrella", "2602", kind="T"),
    _c(31, "handbag", "1f45c", kind="T"),
    _c(32, "tie", "1f454"),
    _c(33, "suitcase", "1f9f3", kind="T"),
    _c(34, "frisbee", "1f94f"),
    _c(35, "skis", "1f3bf", plural="skis", kind="M"),
    _c(37, "sports ball", "26bd", "ball", kind="T"),
    _c(38, "kite", "1fa81", kind="T"),
    _c(41, "skateboard", "1f6f9"),
    _c(43, "tennis racket", "1f3f8", "racket"),
    _c(44, "bottle", "1f37e"),
    _c(47, "cup", "2615", kind="T"),
    _c(48, "fork", "draw:fork"),
    _c(49, "knife", "1f52a", plural="knives"),
    _c(50, "spoon", "1f944"),
    _c(51, "bowl", "1f963", kind="T"),
    _c(52, "banana", "1f34c"),
    _c(53, "apple", "1f34e"),
    _c(54, "sandwich", "1f96a", plural="sandwiches"),
    _c(55, "orange", "1f34a"),
    _c(56, "broccoli", "1f966", plural="broccoli", kind="M"),
    _c(57, "carrot", "1f955"),
    _c(59, "pizza", "1f355"),
    _c(60, "donut", "1f369"),
    _c(61, "cake", "1f382"),
    _c(62, "chair", "1fa91", kind="LT"),
    _c(63, "couch", "1f6cb", plural="couches", kind="LT"),
    _c(64, "potted plant", "1fab4", "houseplant"),
    _c(65, "bed", "1f6cf", kind="LT"),
    _c(67, "dining table", "draw:table", "table", kind="LT"),
    _c(70, "toilet", "1f6bd", kind="L"),
    _c(72, "tv", "1f4fa", "television", kind="L"),
    _c(73, "laptop", "1f4bb"),
    _c(74, "mouse", "1f5b1", plural="mice"),
    _c(76, "keyboard", "2328"),
    _c(77, "cell phone", "1f4f1", "phone"),
    _c(79, "oven", "draw:oven", kind="L"),
    _c(82, "refrigerator", "draw:refrigerator", kind="L"),
    _c(84, "book", "1f4d5", kind="T"),
    _c(85, "clock", "23f0"),
    _c(86, "vase", "1f3fa", kind="T"),
    _c(87, "scissors", "2702", plural="scissors", kind="M"),
    _c(88, "teddy bear", "1f9f8", "teddybear"),
    _c(90, "toothbrush", "1faa5", plural="toothbrushes"),
)
BY_NOUN: dict[str, Category] = {c.noun: c for c in CATEGORIES}

# "orange" is left out: CHAIR reads it as the fruit.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (230, 40, 40),
    "blue": (50, 90, 240),
    "green": (40, 190, 70),
    "yellow": (250, 225, 50),
    "purple": (150, 60, 210),
    "pink": (255, 130, 190),
    "black": (60, 60, 60),
    "white": (255, 255, 255),
}

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Place:
    """A kind of place: how it is named and painted, and what is found there."""

    name: str
    within: str  # "in a kitchen"
    top: str
    bottom: str
    palettes: tuple[tuple[Rgb, Rgb], ...]  # (top color, bottom color)
    pattern: str  # plain | tiles | stripes | speckle
    core: tuple[tuple[str, float], ...]
    common: tuple[str, ...]

    @property
    def usual(self) -> tuple[str, ...]:
        """The nouns that belong here, core first."""
        return tuple(noun for noun, _ in self.core) + self.common


def _p(
    name: str,
    within: str,
    ground: str,
    palettes: tuple[tuple[Rgb, Rgb], ...],
    pattern: str,
    core: tuple[tuple[str, float], ...],
    common: str,
) -> Place:
    top, bottom = ground.split("/")
    return Place(name, within, top, bottom, palettes, pattern, core, tuple(common.split()))


PLACES: tuple[Place, ...] = (
    _p(
        "kitchen",
        "in a kitchen",
        "wall/floor",
        (((250, 235, 205), (200, 150, 110)), ((225, 240, 235), (180, 165, 150))),
        "tiles",
        (("table", 0.9), ("cup", 0.8)),
        "bowl fork oven refrigerator knife spoon bottle apple banana carrot broccoli",
    ),
    _p(
        "restaurant",
        "in a restaurant",
        "wall/floor",
        (((150, 70, 70), (110, 75, 50)), ((120, 60, 90), (95, 65, 55))),
        "stripes",
        (("pizza", 0.88), ("fork", 0.75)),
        "knife table bottle cake chair donut sandwich spoon cup orange",
    ),
    _p(
        "street",
        "on a street",
        "sky/road",
        (((150, 195, 235), (115, 115, 120)), ((200, 205, 215), (90, 90, 95))),
        "plain",
        (("car", 0.92), ("stoplight", 0.78)),
        "person bus truck bicycle motorcycle umbrella handbag dog",
    ),
    _p(
        "park",
        "in a park",
        "sky/grass",
        (((165, 215, 250), (120, 190, 90)), ((190, 225, 245), (95, 170, 80))),
        "speckle",
        (("bench", 0.88), ("person", 0.8)),
        "dog frisbee kite bicycle bird ball skateboard racket",
    ),
    _p(
        "farm",
        "on a farm",
        "sky/field",
        (((200, 230, 250), (190, 175, 90)), ((225, 235, 240), (165, 150, 75))),
        "stripes",
        (("cow", 0.9), ("sheep", 0.78)),
        "horse truck bird dog person apple carrot",
    ),
    _p(
        "savanna",
        "on the savanna",
        "sky/ground",
        (((250, 215, 150), (205, 160, 90)), ((245, 190, 130), (190, 140, 80))),
        "speckle",
        (("elephant", 0.9), ("zebra", 0.8)),
        "giraffe bird bear horse truck",
    ),
    _p(
        "beach",
        "on a beach",
        "sea/sand",
        (((70, 160, 215), (240, 220, 165)), ((90, 190, 205), (230, 205, 150))),
        "stripes",
        (("boat", 0.88), ("umbrella", 0.78)),
        "person ball kite bird frisbee chair book bottle",
    ),
    _p(
        "bedroom",
        "in a bedroom",
        "wall/carpet",
        (((215, 195, 225), (150, 120, 165)), ((235, 215, 220), (165, 130, 140))),
        "plain",
        (("bed", 0.94), ("teddybear", 0.75)),
        "book clock chair phone cat vase laptop handbag",
    ),
    _p(
        "living room",
        "in a living room",
        "wall/rug",
        (((205, 220, 190), (150, 100, 80)), ((230, 225, 195), (130, 85, 75))),
        "stripes",
        (("couch", 0.92), ("television", 0.82)),
        "houseplant cat book vase clock dog table phone",
    ),
    _p(
        "office",
        "in an office",
        "wall/floor",
        (((215, 225, 235), (125, 135, 150)), ((195, 205, 210), (105, 115, 125))),
        "plain",
        (("laptop", 0.9), ("keyboard", 0.82)),
        "mouse phone chair book cup tie scissors houseplant clock",
    ),
    _p(
        "bathroom",
        "in a bathroom",
        "tiles/floor",
        (((195, 230, 240), (220, 225, 230)), ((180, 220, 215), (205, 215, 215))),
        "tiles",
        (("toilet", 0.95), ("toothbrush", 0.82)),
        "bottle scissors vase cup houseplant cat",
    ),
    _p(
        "mountain",
        "on a snowy mountain",
        "sky/snow",
        (((120, 175, 230), (245, 248, 252)), ((165, 195, 225), (235, 240, 248))),
        "speckle",
        (("skis", 0.92), ("person", 0.8)),
        "backpack dog bear bench phone suitcase",
    ),
    _p(
        "airport",
        "at an airport",
        "sky/runway",
        (((185, 205, 225), (150, 150, 155)), ((210, 215, 225), (135, 138, 145))),
        "stripes",
        (("airplane", 0.94), ("suitcase", 0.82)),
        "bus truck backpack person handbag tie car phone",
    ),
    _p(
        "station",
        "at a station",
        "wall/platform",
        (((165, 150, 140), (190, 185, 175)), ((140, 130, 130), (175, 165, 155))),
        "tiles",
        (("train", 0.94), ("clock", 0.78)),
        "person bench backpack suitcase handbag umbrella bird",
    ),
)
PLACE_BY_NAME: dict[str, Place] = {p.name: p for p in PLACES}
