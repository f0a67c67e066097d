"""A name below the floor is never written, however a vocabulary spells it."""

import gc
import random
import re
import weakref

import pytest
import torch

import vocabularies
from revisit.decoding.row_guard import RowGuard
from revisit.errors import RevisitError
from revisit.guard.rates import Rate
from revisit.models.loading import load
from revisit.models.names import names_of, plurals, read_names
from revisit.models.spelling import Place, Spelling, spelling_of
from revisit.models.tokens import word_tokens

NAMES = ["tiny", *vocabularies.names()]


def tokenizer_of(name):
    return load("tiny")[1].tokenizer if name == "tiny" else vocabularies.load(name)


def named(text, names):
    """The categories that a text names."""
    return names.find(text)


def write(guard, tokens, dice, length=60):
    """Write at random among the tokens that are not blocked."""
    written = []
    for _ in range(length):
        free = set(tokens) - set(guard.blocked(written).tolist())
        if not free:
            break
        written.append(dice.choice(sorted(free)))
    return written


@pytest.mark.parametrize("name", NAMES)
def test_no_spelling_of_a_withheld_name_can_be_written(name):
    tokenizer = tokenizer_of(name)
    spelling = spelling_of(tokenizer)
    dice = random.Random(name)
    low = {category for category in spelling.first_tokens if dice.random() < 0.7}
    guard = RowGuard(spelling, {key: 0.0 if key in low else 1.0 for key in spelling.first_tokens}, 0.5)
    some = dice.sample(sorted(spelling.names.of), 60)
    pieces = {token for form in some for token in word_tokens(tokenizer, form)}
    letters = {token for token, text in enumerate(spelling.texts) if re.fullmatch(r" ?[a-z]{1,2}|[ .,-]", text)}
    seen = set()
    for _ in range(40):
        written = write(guard, [*pieces, *letters], dice)
        if guard.follow(written).place.open:
            written = written[:-1]  # cut within a longer name
        text = "".join(spelling.texts[token] for token in written)
        seen |= {*named(text, spelling.names)}
    assert seen
    assert not seen & low


@pytest.mark.parametrize("name", NAMES)
def test_names_are_followed_in_every_spelling(name):
    tokenizer = tokenizer_of(name)
    spelling = spelling_of(tokenizer)
    for text in ("a dog and two cats.", "A Dog", "the hot dog, a (cat) and knives", "people at a dining table"):
        guard = RowGuard(spelling, {}, 0.5)
        followed = guard.follow(tokenizer.encode(f"{text} .", add_special_tokens=False))
        assert [category for category, _ in followed.named] == named(text, spelling.names)


def test_longer_names_count_and_words_that_only_begin_a_name_are_free():
    tokenizer = tokenizer_of("bytes")
    spelling = spelling_of(tokenizer)

    def free(text, word, withheld):
        guard = RowGuard(spelling, dict.fromkeys(spelling.first_tokens, 1.0) | dict.fromkeys(withheld, 0.0), 0.5)
        (token,) = word_tokens(tokenizer, word)
        return token not in guard.blocked(tokenizer.encode(text, add_special_tokens=False)).tolist()

    assert free("a hot", "dog", ["dog"])
    assert not free("a big", "dog", ["dog"])
    assert not free("a hot", "dog", ["hot dog"])
    assert free("a", "traffic", ["traffic light"])
    assert not free("a traffic", "light", ["traffic light"])
    assert not free("a traffic cone and a", "traffic", ["traffic light"])  # led to no name before
    assert not free("a cat and a dog and a", "dog", [])
    assert free("a cat and a dog and the", "dog", [])
    assert not free("a cat, a dog and the dog and the", "dog", [])
    assert free("a hot dog. the hot", "dog", ["dog"])


def test_a_piece_of_an_allowed_name_must_go_on():
    spelling = Spelling(tokenizer_of("bytes"), (("bow",), ("bowl",)))
    bow, bowl = (word_tokens(tokenizer_of("bytes"), word)[0] for word in ("bow", "bowl"))
    spelling._extended = {"bow": ["bowl"]}  # as in vocabularies that have no token for "bowl"
    guard = RowGuard(spelling, {"bow": 0.0, "bowl": 1.0}, 0.5)
    assert bow not in guard.blocked([])
    after = guard.blocked([bow]).tolist()
    letter = next(token for token, text in enumerate(spelling.texts) if text == "l")
    assert bowl in after
    assert letter not in after
    assert guard.follow([bow, letter]).place.ended == "bowl"


def test_following_again_from_another_text_gives_the_same():
    spelling = spelling_of(tokenizer_of("bytes"))
    dice, guard = random.Random(1), RowGuard(spelling, dict.fromkeys(spelling.first_tokens, 0.3), 0.5)
    for _ in range(30):
        tokens = [dice.randrange(len(spelling.texts)) for _ in range(12)]
        fresh = RowGuard(spelling, guard.support, 0.5)
        assert torch.equal(guard.blocked(tokens), fresh.blocked(tokens))


def test_place_of_a_text():
    spelling = spelling_of(tokenizer_of("bytes"))
    place, found = spelling.place(Place(), spelling.texts.index(" dog"))
    assert (place.start, place.fresh, place.ended, found) == ("dog", False, "dog", ())
    place, found = spelling.place(place, spelling.texts.index("."))
    assert (place.start, place.fresh, place.ended, found) == ("", True, None, ("dog",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dog", "dogs"),
        ("bench", "benches"),
        ("puppy", "puppies"),
        ("knife", "knives"),
        ("policeman", "policemen"),
        ("mouse", "mice"),
    ],
)
def test_plurals(name, expected):
    assert expected in plurals(name)


def test_chairs_names_are_all_there():
    names = names_of(())
    assert len(names.categories) == 80
    assert names.of["baby elephant"] == "elephant"
    assert names.of["wine glasses"] == "wine glass"


def test_a_file_of_names(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("Forklift, fork lift\n\npallet,  crate \n")
    assert read_names(path) == (("forklift", "fork lift"), ("pallet", "crate"))
    path.write_text("dog, puppy\ncat, puppy\n")
    with pytest.raises(RevisitError, match="told apart"):
        read_names(path)
    path.write_text("\n")
    with pytest.raises(RevisitError, match="no names"):
        read_names(path)


def test_only_the_last_lists_of_names_are_kept():
    tokenizer, lists = tokenizer_of("bytes"), [((name,),) for name in sorted(names_of(()).categories)[:20]]
    found = [weakref.ref(spelling_of(tokenizer, names)) for names in lists]
    found[12] = weakref.ref(spelling_of(tokenizer, lists[12]))  # used again
    spelling_of(tokenizer, lists[0])
    gc.collect()
    assert [number for number, spelling in enumerate(found) if spelling() is not None] == [12, *range(14, 20)]


def test_names_that_a_tokenizer_cannot_handle():
    with pytest.raises(RevisitError, match="begin"):
        Spelling(tokenizer_of("bytes"), (("犬",),))
    with pytest.raises(RevisitError, match="told apart"):
        Spelling(tokenizer_of("bytes"), (("hot dog",), ("hot bowl",)))


def test_a_calibration_with_a_long_name_gets_a_short_message():
    texts = ("model", "fingerprint", "dtype", "method", "prompt", "data", "revisit")
    numbers = ("risk", "confidence", "layer", "max_new_tokens", "threshold", "images", "mistakes")
    content = (
        {"bound": "floor", "loss": "caption", "settings": {}} | dict.fromkeys(texts, "x") | dict.fromkeys(numbers, 1)
    )
    with pytest.raises(RevisitError, match="was changed"):
        Rate.parse(content, "file")
    with pytest.raises(RevisitError, match="is not a calibration") as caught:
        Rate.parse(content | {"A" * 100_000: 1}, "file")
    assert len(str(caught.value)) < 300
