"""Which words of a text does the picture support? `revisit.check` asks the vision tokens of any model, in one forward pass.

`support.py` computes it; here are the settings, the words that are checked, and what a caller sees.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from revisit.benchmarks.chair_words import object_words
from revisit.embedded.familiar import advice, unlike_scenes
from revisit.errors import RevisitError, as_path, need
from revisit.explain import check_page
from revisit.explain.support import WORD, Vocabulary, Word, Written, read_texts, support
from revisit.models import DESCRIBE
from revisit.models.config import is_embedded, name_of
from revisit.models.images import open_image
from revisit.models.loading import loaded_pair
from revisit.models.parts import Head, ModelParts
from revisit.models.prompts import chat_text, encode, refuse_image_tokens

if TYPE_CHECKING:
    import pandas
    from PIL.Image import Image
    from torch import Tensor

    from revisit.explain.record import Decode
    from revisit.models.geometry import Layout
    from revisit.models.types import ImageLike, Model, Processor, Tokenizer

THRESHOLD = 0.05  # for models that recommend none
# Function words, counts, and words about the picture itself: no patch can show them.
STOP = frozenset(
    """a about above across all along also an and another any are around as at background be behind below beneath beside between
    both but by can center each few five for foreground four from front has have he her here his i image in inside into is it its
    left like located made many middle more most near nearby next no not of off on one onto or other out outside over part photo
    picture placed right scene seem seems seen several she show shown shows side some something than that the their them there
    these they thing things this those three through to together top two under up various very view visible was were what where
    which while who with without""".split()  # noqa: SIM905
)


class CheckSettings(TypedDict):
    """How support is read: hidden state number, and the support below which a word is doubtful."""

    layer: int
    threshold: float


TRUSTED = 0.8  # least AUROC, measured on a model, of words that its check calls doubtful without a warning
Words = str | Sequence[str]  # which words are checked: "objects", "content", or a list


@dataclass
class Check:
    """What `check` returns: every word of a text with its support. A notebook shows the text and the picture.

    Attributes:
        text: The text that was checked.
        words: Its words, in order.
        threshold: Checkable words with less support are flagged.
        model: The model whose vision tokens were asked.
        images: The pictures.
        notes: What a reader should know, such as a model without a recommended threshold.
    """

    text: str
    words: list[Word]
    threshold: float
    model: str
    images: list[Image]
    notes: list[str] = field(default_factory=list)

    def flagged(self) -> list[Word]:
        """The checkable words with less support than the threshold, in the order of the text."""
        return [word for word in self.words if word.checkable and word.support < self.threshold]

    @property
    def doubt(self) -> float:
        """One minus the least support of a checkable word; 0 if there is none."""
        return 1 - min((word.support for word in self.words if word.checkable), default=1.0)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], images: Sequence[Image] = ()) -> Check:
        """A check that `to_dict` wrote, with its pictures."""
        names = Word.__dataclass_fields__
        words = [Word(**{name: word[name] for name in names}) for word in stored["words"]]
        return cls(stored["text"], words, stored["threshold"], stored["model"], list(images), list(stored["notes"]))

    def to_dict(self) -> dict[str, Any]:
        """The check without its pictures, ready for JSON."""
        doubtful = self.flagged()
        words = [{**vars(word), "flagged": word in doubtful} for word in self.words]
        kept = {"text": self.text, "model": self.model, "threshold": self.threshold, "doubt": self.doubt}
        return {**kept, "flagged": [word.text for word in doubtful], "words": words, "notes": self.notes}

    def to_pandas(self) -> pandas.DataFrame:
        """A table with one row for each word."""
        need("pandas")
        import pandas

        return pandas.DataFrame(self.to_dict()["words"])

    def save(self, path: str | Path) -> Path:
        """Write a page (.html) or the words (.json); returns the path."""
        return check_page.save(as_path(path), self)

    def __repr__(self) -> str:
        words = ", ".join(word.text for word in self.flagged()) or "none"
        return f"Check({len(self.words)} words, flagged: {words})"

    def _repr_html_(self) -> str:
        return check_page.fragment(self)


def check(
    model: str | Path | Model | tuple[Model, Processor],
    image: ImageLike | Sequence[ImageLike],
    text: str,
    prompt: str | None = None,
    *,
    threshold: float | None = None,
    words: Words = "objects",
) -> Check:
    """Check each word of a text against a picture, in one forward pass. The text may come from anywhere.

        checked = revisit.check("tiny", "photo.jpg", "A dog on a couch.")
        print(checked.flagged())
        checked.save("page.html")

    Args:
        model: A Hub id, a folder, "tiny", or the pair (model, processor) that `revisit.load` returns.
        image: A path, bytes, a PIL image or an array of pixels; or a list of them, which go into one prompt.
        text: What is to be checked.
        prompt: The question that the text answers; by default, to describe the image.
        threshold: Words with less support are flagged; by default what the model recommends (`check` in its
            generation_config.json), or 0.05.
        words: Which words are checked: "objects" (words for things, in CHAIR's list; what was measured), "content" (all but
            function words, counts and digits), or a list of words.

    Returns:
        The words with their support.

    Raises:
        RevisitError: If the model, the image or the text cannot be used.
    """
    return check_many(model, [image], [text], prompt, threshold=threshold, words=words)[0]


def check_many(
    model: str | Path | Model | tuple[Model, Processor],
    images: Sequence[ImageLike | Sequence[ImageLike]],
    texts: Sequence[str],
    prompt: str | None = None,
    *,
    threshold: float | None = None,
    words: Words = "objects",
    batch_size: int = 8,
) -> list[Check]:
    """Check several texts, each against its own picture; see `check`.

    Args:
        model: As for `check`.
        images: For each text its image, or list of images.
        texts: The texts.
        prompt: The question that the texts answer.
        threshold: As for `check`.
        words: As for `check`.
        batch_size: Texts in one forward pass.
    """
    if isinstance(texts, str) or len(images) != len(texts):
        raise RevisitError(f"Each text needs its own picture: there are {len(images)} pictures and {len(texts)} texts.")
    for text in texts:
        check_text(text)
    check_options(prompt, threshold, words)
    pictures = []
    for entry in images:
        several: list[Any] = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        if not several or any(image is None for image in several):
            raise RevisitError("No image was given: a text is checked against a picture.")
        pictures.append([open_image(image) for image in several])
    loaded, processor = loaded_pair(model, "check")
    refuse_image_tokens(processor, "prompt", prompt or "")
    checker, found = Checker(loaded, processor.tokenizer, threshold, words), list[Check]()
    for start in range(0, len(texts), batch_size):
        part = slice(start, start + batch_size)
        own = pictures[part]
        before = [chat_text(processor, prompt or DESCRIBE, len(each)) for each in own]
        inputs = encode(processor, before, own, loaded.device)
        for read in read_texts(loaded, processor, inputs, before, own, texts[part], checker.layers):
            written = read.written(checker.vocabulary.asked)
            found.append(checker.check(read.head, written, read.vision, read.layout, read.images))
    return found


class Checker:
    """Asks one model's vision tokens: its recommended settings, and what the caller wants to know."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, threshold: float | None = None, words: Words = "objects"
    ) -> None:
        self.name, self.vocabulary = name_of(model), Vocabulary(tokenizer, word_test(words))
        self.settings, self.notes = settings_of(model, threshold)
        # 0: is the picture like those that the embedded model knows?
        self.layers = sorted({0, self.settings["layer"]})

    def check(
        self, head: Head, written: Written, vision: Mapping[int, Tensor], places: Layout, images: list[Image]
    ) -> Check:
        """The check of a text, from the vision tokens' states (n, d) by layer and their places on the pictures."""
        words = support(head, self.vocabulary, written, vision[self.settings["layer"]], places)
        strange = is_embedded(self.name) and unlike_scenes(head, vision[0], len(images))
        notes = [*self.notes, *([advice()] if strange else [])]
        if not any(word.checkable for word in words):
            notes.append("None of these words is checked: by default only English words for things are (see `words`).")
        return Check(written.text, words, self.settings["threshold"], self.name, images, notes)


def check_text(text: object) -> None:
    """Raises RevisitError if a text has no word that could be checked."""
    if not isinstance(text, str):
        raise RevisitError(f"A text to check is a string, not {type(text).__name__}.")
    if not WORD.search(text):
        raise RevisitError(f"There is no word to check in the text {text[:40]!r}.")


def check_options(prompt: str | None, threshold: float | None, words: Words) -> None:
    """Raises RevisitError for options of `check` that are wrong for every model."""
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise RevisitError(f"The prompt must be the question that the text answers, not {prompt!r}.")
    if threshold is not None and (type(threshold) not in (int, float) or not 0 <= threshold <= 1):
        raise RevisitError(f"The threshold is a support from 0 to 1, not {threshold!r}.")
    word_test(words)


def settings_of(model: Model, threshold: float | None = None) -> tuple[CheckSettings, list[str]]:
    """What the model recommends (`check` in its generation_config.json), or the last layer; and notes for the reader."""
    depth = ModelParts.of(model).depth
    own = getattr(model.generation_config, "check", None) or {}
    if not isinstance(own, Mapping) or not set(own) <= {"layer", "threshold", "auroc"}:
        raise RevisitError(
            "The entry `check` of the model's generation_config.json may have layer, threshold and auroc only."
        )
    layer, recommended, measured = own.get("layer", depth), own.get("threshold", THRESHOLD), own.get("auroc", 1)
    if not isinstance(layer, int) or not 0 <= layer <= depth or not 0 <= recommended <= 1 or not 0 <= measured <= 1:
        raise RevisitError(
            f"The entry `check` of the model's generation_config.json is wrong: layer must be from 0 to {depth}, threshold "
            "and auroc from 0 to 1."
        )
    notes = []
    if threshold is None and "threshold" not in own:
        notes.append(
            f"No threshold is recommended for this model, and how well it can check was not measured: {THRESHOLD} is a guess, so "
            "compare supports instead, or run `revisit check --calibrate DATA`."
        )
    if measured < TRUSTED:
        notes.append(
            f"This model's vision tokens often misread: their AUROC at telling present from absent objects is only {measured:.2f}."
        )
    return {"layer": layer, "threshold": recommended if threshold is None else threshold}, notes


def check_answer(decode: Decode) -> Check:
    """The check of what the first method of a decode wrote, from the states that its prefill left: no forward pass."""
    vision, tokenizer, answer = decode.vision, decode.tokenizer, decode.answers[0]
    model, head = (None, None) if vision is None else (vision.model(), vision.head())
    if vision is None or model is None or head is None or tokenizer is None:
        raise RevisitError("The model was released before this check: keep it loaded, or call revisit.check.")
    assert answer.trace is not None  # `explain` keeps it
    tokens = [step.token for step in answer.steps]
    written = Written.decoded(tokenizer, answer.text, tokens, answer.trace.rows[0])
    return Checker(model, tokenizer).check(head, written, vision.row(0), decode.layout, decode.images)


def word_test(words: Words) -> Callable[[str], bool]:
    """Whether a word is to be checked, as a function."""
    if words == "objects":
        return is_object
    if words == "content":
        return is_content
    if isinstance(words, str) or not isinstance(words, Iterable) or not all(isinstance(word, str) for word in words):
        raise RevisitError(f"words must be 'objects', 'content' or a list of words, not {words!r}.")
    listed = {word.strip().lower() for word in words}
    if not listed - {""}:
        raise RevisitError("The list of words to check is empty.")
    return lambda word: word.lower() in listed


@lru_cache(1 << 14)
def is_object(word: str) -> bool:
    """Whether a word is in CHAIR's list, singular or plural."""
    return object_words().fullmatch(word) is not None


def is_content(word: str) -> bool:
    """Whether a word is made of letters and is not a function word or a count."""
    letters = re.sub(r"['’ -]", "", word)
    return letters.isalpha() and word.lower() not in STOP and (len(letters) > 1 or not letters.isascii())
