"""The words CHAIR listens for: the 80 COCO categories and the nouns that count as each of them.

The facts are those of `data/synonyms.txt` of the original CHAIR (LisaAnne/Hallucination, BSD-2), put in our own form:
each category with its other words in alphabetical order. Five entries of that file are left out because no caption can
ever produce them: "motor bike" and "cheesecake" (stored there with a leading blank), "iPhone" (captions are
lower-cased), "stove top oven" (three words, only pairs are merged) and "bow tie" (rewritten to "tie" before the
look-up).
"""

from __future__ import annotations

import re
from functools import cache

_OTHER_WORDS: dict[str, str] = {
    "person": (
        "adult, baby, baker, bicyclist, biker, boy, bride, buyer, caller, camper, chef, child, children, cop, "
        "cowboy, coworker, doctor, drinker, driver, father, female, foreigner, gentleman, girl, grandchild, "
        "groom, guy, hunter, kid, lady, male, man, mother, offender, officer, passenger, patient, people, "
        "pitcher, player, policeman, politician, rider, serviceman, shopper, sister, skateboarder, skater, "
        "skier, snowboarder, soldier, solider, student, teenager, thief, traveler, trespasser, villager, "
        "walker, woman, worker"
    ),
    "bicycle": "bike, minibike, trike, unicycle",
    "car": "automobile, cab, coupe, hatchback, jeep, limo, minivan, sedan, suv, taxi, taxicab, van",
    "motorcycle": "moped, motor cycle, motorbike, scooter",
    "airplane": "air plane, airbus, aircraft, biplane, jet, jetliner, monoplane, plane, seaplane",
    "bus": "minibus, trolley",
    "train": "caboose, locomotive, tramway",
    "truck": "firetruck, hauler, lorry, pickup",
    "boat": (
        "barge, battleship, canoe, catamaran, dinghy, ferry, ferryboat, freighter, houseboat, kayak, "
        "lifeboat, liner, motorboat, paddleboat, pontoon, powerboat, riverboat, rowboat, sailboard, sailboat, "
        "schooner, ship, skiff, speedboat, steamboat, steamship, trawler, tugboat, vessel, watercraft, yacht"
    ),
    "traffic light": "stop light, stoplight, street light, streetlight, traffic signal",
    "fire hydrant": "hydrant",
    "stop sign": "",
    "parking meter": "",
    "bench": "pew",
    "bird": (
        "blackbird, bluebird, bluejay, buzzard, chickadee, cockatiel, cockatoo, condor, cormorant, cowbird, "
        "crow, duck, egret, falcon, finch, flamingo, fowl, goose, gosling, gull, heron, hummingbird, "
        "kingfisher, loon, lorikeet, macaw, magpie, mallard, oriole, osprey, ostrich, owl, parakeet, parrot, "
        "peacock, peafowl, pelican, pheasant, pigeon, puffin, quail, raven, robin, rooster, sandpiper, "
        "seabird, seagull, shorebird, songbird, sparrow, swan, turkey, vulture, warbler, waterbird, "
        "waterfowl, willet, woodpecker"
    ),
    "cat": "feline, kitten, tabby",
    "dog": (
        "beagle, brindle, bulldog, canine, chihuahua, cocker, collie, corgi, dachshund, doberman, doggie, "
        "doggy, greyhound, hound, husky, labrador, mutt, pitbull, poodle, pug, pup, puppy, retriever, "
        "rottweiler, schnauzer, sheepdog, spaniel, terrier, weimaraner, whippet"
    ),
    "horse": "bronc, bronco, clydesdale, colt, equine, foal, mare, mustang, palomino, pony, racehorse, stallion",
    "sheep": "ewe, goat, lamb, ram",
    "cow": "bison, buffalo, bull, calf, cattle, heifer, holstein, ox, oxen, zebu",
    "elephant": "",
    "bear": "panda",
    "zebra": "",
    "giraffe": "",
    "backpack": "knapsack",
    "umbrella": "",
    "handbag": "briefcase, purse, wallet",
    "tie": "bow",
    "suitcase": "luggage, suit case",
    "frisbee": "",
    "skis": "ski",
    "snowboard": "",
    "sports ball": "ball",
    "kite": "",
    "baseball bat": "",
    "baseball glove": "",
    "skateboard": "",
    "surfboard": "longboard, shortboard, skimboard, wakeboard",
    "tennis racket": "racket",
    "bottle": "",
    "wine glass": "",
    "cup": "",
    "fork": "",
    "knife": "knive, pocketknife",
    "spoon": "",
    "bowl": "container",
    "banana": "",
    "apple": "",
    "sandwich": "burger, cheeseburger, hamburger, sub",
    "orange": "",
    "broccoli": "",
    "carrot": "",
    "hot dog": "",
    "pizza": "",
    "donut": "bagel, doughnut",
    "cake": "coffeecake, cupcake, pancake, shortcake",
    "chair": "seat, stool",
    "couch": "chesterfield, futon, loveseat, recliner, settee, sofa",
    "potted plant": "houseplant",
    "bed": "",
    "dining table": "desk, table",
    "toilet": "commode, lavatory, potty, urinal",
    "tv": "monitor, television, televison",
    "laptop": "computer, laptop computer, lenovo, macbook, netbook, notebook",
    "mouse": "",
    "remote": "",
    "keyboard": "",
    "cell phone": "cellphone, mobile phone, phon, phone, smartphone, telephone",
    "microwave": "",
    "oven": "stove, stovetop",
    "toaster": "",
    "sink": "",
    "refrigerator": "freezer, fridge",
    "book": "",
    "clock": "",
    "vase": "",
    "scissors": "",
    "teddy bear": "teddybear",
    "hair drier": "hairdryer",
    "toothbrush": "",
}

CATEGORIES: tuple[str, ...] = tuple(_OTHER_WORDS)

# word -> category, the category names themselves included
WORDS: dict[str, str] = {
    word: category
    for category, others in _OTHER_WORDS.items()
    for word in (category, *filter(None, others.split(", ")))
}

# Word pairs (of lemmas) that count as one word, by what they become.
_KEPT_PAIRS = (
    "motor bike, motor cycle, air plane, traffic light, street light, traffic signal, stop light, fire "
    "hydrant, stop sign, parking meter, suit case, sports ball, baseball bat, baseball glove, tennis "
    "racket, wine glass, hot dog, cell phone, mobile phone, teddy bear, hair drier, potted plant, laptop "
    "computer, home plate, train track"
)
_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal", "cub")

PAIRS: dict[tuple[str, str], str] = {
    **{(pair.split()[0], pair.split()[1]): pair for pair in _KEPT_PAIRS.split(", ")},
    **{(age, animal): animal for age in ("baby", "adult") for animal in _ANIMALS},
    ("passenger", "jet"): "jet",
    ("passenger", "train"): "train",
    ("bow", "tie"): "tie",
    ("toilet", "seat"): "toilet",
    ("wine", "glas"): "wine glass",
}


@cache
def object_words() -> re.Pattern[str]:
    """All words with an optional plural ending, the longest first."""
    words = "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True))
    return re.compile(rf"\b({words})(?:e?s)?\b", re.IGNORECASE)
