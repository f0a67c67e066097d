"""Which words of a text does the picture support? `revisit.check` asks the vision tokens of any model, in one forward pass.

The picture, the prompt and the text run through the model once (teacher forcing). A word is supported as far as some vision tokens
say it: read through the model's own head, they give its tokens a high probability over the whole vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from revisit.benchmarks.chair_words import object_words
from revisit.embedded.familiar import NOTICE, advice, unlike_scenes
from revisit.errors import RevisitError, as_path
from revisit.explain.forcing import force
from revisit.explain.prefill import logit_slices
from revisit.explain.tokens import Span, token_spans, token_text, word_tokens, writers
from revisit.models import DESCRIBE
from revisit.models.config import is_embedded, name_of
from revisit.models.geometry import Layout, layout
from revisit.models.images import open_image
from revisit.models.loading import loaded_pair
from revisit.models.parts import Head, ModelParts
from revisit.models.prompts import chat_text, prepare, vision_texts
from revisit.taps.states import vision_mask

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.explain.record import Decode
    from revisit.models.types import ImageLike, Inputs, Model, Processor, Tokenizer

TOP = 5  # vision tokens whose mean probability is the support of a token
THRESHOLD = 0.05  # for models that recommend none
CANDIDATES = 20  # likeliest tokens of the model among which a better word is sought
PLAUSIBLE = 1e-3  # least probability of such a token, as a share of the likeliest one's
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
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


Words = str | Sequence[str]  # which words are checked: "objects", "content", or a list


@dataclass(frozen=True)
class Word:
    """A word of the text.

    Attributes:
        text: The word as written.
        start: Where it begins in the text.
        end: Where it ends, excluded.
        support: How far the picture supports it, from 0 to 1.
        checkable: Whether it is among the words that were to be checked.
        probability: The model's own probability of the word; None where it was not recorded.
        instead: A word with a larger product of the model's probability and the picture's support, if there is one.
        token: The vision token that supports it most.
        image: The number of the picture that the token belongs to, from 0.
        row: The row of that token's patch, where the layout is known.
        column: The column of that patch.
        box: The patch in pixels of the picture: left, top, right, bottom.
    """

    text: str
    start: int
    end: int
    support: float
    checkable: bool
    probability: float | None
    instead: str | None
    token: int
    image: int = 0
    row: int | None = None
    column: int | None = None
    box: Sequence[float] | None = None


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

    def to_pandas(self) -> Any:
        """A table with one row for each word."""
        import pandas as pd

        return pd.DataFrame(self.to_dict()["words"])

    def save(self, path: str | Path) -> Path:
        """Write a page (.html) or the words (.json); returns the path."""
        from revisit.explain import check_page

        return check_page.save(as_path(path), self)

    def __repr__(self) -> str:
        words = ", ".join(word.text for word in self.flagged()) or "none"
        return f"Check({len(self.words)} words, flagged: {words})"

    def _repr_html_(self) -> str:
        from revisit.explain import check_page

        return check_page.fragment(self)


def check(
    model: str | Path | Model | tuple[Model, Processor],
    image: ImageLike | Sequence[ImageLike],
    text: str,
    prompt: str | None = None,
    *,
    processor: Processor | None = None,
    threshold: float | None = None,
    words: Words = "objects",
) -> Check:
    """Check each word of a text against a picture, in one forward pass. The text may come from anywhere.

        checked = revisit.check("tiny", "photo.jpg", "A dog on a couch.")
        print(checked.flagged())
        checked.save("page.html")

    Args:
        model: A hub id, a folder, "tiny", or the pair (model, processor) that `revisit.load` returns.
        image: A path, bytes, a PIL image or an array of pixels; or a list of them, which go into one prompt.
        text: What is to be checked.
        prompt: The question that the text answers; by default, to describe the image.
        processor: The processor of a model that is given without it.
        threshold: Words with less support are flagged; by default what the model recommends (`check` in its
            generation_config.json), or 0.05.
        words: Which words are checked: "objects" (words for things, in CHAIR's list; what was measured), "content" (all but
            function words, counts and digits), or a list of words.

    Returns:
        The words with their support.

    Raises:
        RevisitError: If the model, the image or the text cannot be used.
    """
    pair: Any = model if processor is None else (model, processor)
    return check_many(pair, [image], [text], prompt, threshold=threshold, words=words)[0]


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
        _usable(text)
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise RevisitError(f"The prompt must be the question that the text answers, not {prompt!r}.")
    if threshold is not None and (type(threshold) not in (int, float) or not 0 <= threshold <= 1):
        raise RevisitError(f"The threshold is a support from 0 to 1, not {threshold!r}.")
    asked = word_test(words)
    pictures = []
    for entry in images:
        several: list[Any] = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        if not several or any(image is None for image in several):
            raise RevisitError("No image was given: a text is checked against a picture.")
        pictures.append([open_image(image) for image in several])
    loaded, processor = loaded_pair(model, "check")
    settings, notes = settings_of(loaded, threshold)
    head, name, found = ModelParts.of(loaded).head, name_of(loaded), list[Check]()
    for start in range(0, len(texts), batch_size):
        part = slice(start, start + batch_size)
        layers = [0, settings["layer"]]
        for own, read in zip(
            pictures[part],
            read_texts(loaded, processor, pictures[part], texts[part], prompt or DESCRIBE, layers),
            strict=True,
        ):
            strange = is_embedded(name) and unlike_scenes(head, read.vision[0], len(own))
            seen = [*notes, f"{NOTICE} {advice('This picture', flag='')}"] if strange else list(notes)
            states = read.vision[settings["layer"]]
            checked = support(head, processor.tokenizer, read.written(head, asked), states, read.layout, asked)
            found.append(Check(read.text, checked, settings["threshold"], name, own, seen))
    return found


def _usable(text: object) -> None:
    if not isinstance(text, str):
        raise RevisitError(f"A text to check is a string, not {type(text).__name__}.")
    if not WORD.search(text):
        raise RevisitError(f"There is no word to check in the text {text[:40]!r}.")


def settings_of(model: Model, threshold: float | None = None) -> tuple[CheckSettings, list[str]]:
    """What the model recommends (`check` in its generation_config.json), or the last layer; and notes for the reader."""
    depth = ModelParts.of(model).depth
    own = getattr(model.generation_config, "check", None) or {}
    if not isinstance(own, Mapping) or not set(own) <= {"layer", "threshold"}:
        raise RevisitError("The entry `check` of the model's generation_config.json may have layer and threshold only.")
    layer, recommended = own.get("layer", depth), own.get("threshold", THRESHOLD)
    if not isinstance(layer, int) or not 0 <= layer <= depth or not 0 <= recommended <= 1:
        raise RevisitError(
            f"The entry `check` of the model's generation_config.json is wrong: layer must be from 0 to {depth}, threshold from 0 to 1."
        )
    notes = []
    if threshold is None and "threshold" not in own:
        notes.append(
            f"No threshold is recommended for this model: {THRESHOLD} is a guess, so compare supports instead."
        )
    return {"layer": layer, "threshold": recommended if threshold is None else threshold}, notes


@dataclass(frozen=True)
class Written:
    """A text as the model saw it: its tokens, and what the model itself would have written."""

    text: str
    tokens: Sequence[int]
    words: Sequence[tuple[int, int, list[int]]]  # start, end and numbers of the tokens of each word
    logs: Sequence[float | None]  # log-probability of each token, where it is known
    likely: Mapping[int, Sequence[tuple[int, float]]]  # by token number: the likeliest tokens there, with probabilities


@dataclass(frozen=True)
class ReadText:
    """A text that a model read after its pictures, with the states that the pass left."""

    text: str
    tokens: list[int]
    spans: list[Span]  # of each token in the text
    states: Tensor  # (tokens, d), each of which predicts a token
    vision: dict[int, Tensor]  # layer -> (vision tokens, d)
    layout: Layout

    @torch.no_grad()
    def written(self, head: Head, asked: Callable[[str], bool]) -> Written:
        """The text with the model's own view of it: its likeliest tokens where a word that is asked for begins."""
        words = word_places(self.text, self.spans)
        starts = {own[0] for start, end, own in words if asked(self.text[start:end])}
        logs: list[float] = []
        likely: dict[int, list[tuple[int, float]]] = {}
        for logits in logit_slices(head, self.states):
            for row in logits.log_softmax(-1):
                if len(logs) in starts:
                    best = row.topk(min(CANDIDATES, len(row)))
                    likely[len(logs)] = list(zip(best.indices.tolist(), best.values.exp().tolist(), strict=True))
                logs.append(float(row[self.tokens[len(logs)]]))
        return Written(self.text, self.tokens, words, logs, likely)


def read_texts(
    model: Model,
    processor: Processor,
    images: Sequence[Sequence[Image]],
    texts: Sequence[str],
    prompt: str,
    layers: Sequence[int],
) -> list[ReadText]:
    """One forward pass over pictures and texts; the vision tokens' states are kept at these layers."""
    vision_ids = ModelParts.of(model).vision_ids
    encoded = [encode_text(processor, prompt, len(own), text) for own, text in zip(images, texts, strict=True)]
    if any(bool(vision_mask(torch.tensor(tokens), vision_ids).any()) for tokens, _ in encoded):
        raise RevisitError("The text contains a token that stands for an image in this model; leave it out.")
    inputs = prepare(processor, [prompt] * len(texts), [list(own) for own in images], model.device)
    forced = force(model, inputs, [tokens for tokens, _ in encoded], layers)
    return [
        ReadText(text, *own, read.states, read.vision, _row_layout(model, processor, inputs, row, images, read.vision))
        for row, (text, own, read) in enumerate(zip(texts, encoded, forced, strict=True))
    ]


def encode_text(processor: Processor, prompt: str, images: int, text: str) -> tuple[list[int], list[Span]]:
    """The tokens that would continue the prompt with this text, and the characters of the text that each one covers."""
    before = chat_text(processor, prompt, images)
    for token in vision_texts(processor):
        if token in text:
            raise RevisitError(f"The text contains {token!r}, which stands for an image in this model; leave it out.")
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise RevisitError("The model's tokenizer does not say which characters a token covers; load a fast tokenizer.")
    # An answer begins with a space after "ASSISTANT:", but not after a line break or a special token.
    blank = "" if before[-1:] in ("", ">", "]") or before[-1].isspace() or text[0].isspace() else " "
    whole = tokenizer(before + blank + text, add_special_tokens=False, return_offsets_mapping=True)
    at = len(before) + len(blank)
    pairs = [
        (int(token), (max(a - at, 0), b - at))
        for token, (a, b) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        if b > at
    ]
    return [token for token, _ in pairs], [span for _, span in pairs]


def _row_layout(
    model: Model,
    processor: Processor,
    inputs: Inputs,
    row: int,
    images: Sequence[Sequence[Image]],
    vision: Mapping[int, Tensor],
) -> Layout:
    """The layout of one row of a batch, from its own part of what the processor says about each image."""
    total, first = sum(map(len, images)), sum(map(len, images[:row]))
    own = {
        name: value[first : first + len(images[row])] if isinstance(value, Tensor) and len(value) == total else value
        for name, value in inputs.items()
    }
    sizes = [image.size for image in images[row]]
    tokens = len(next(iter(vision.values())))
    return layout(model.config, getattr(processor, "image_processor", None), sizes, tokens, own)


def check_answer(decode: Decode, words: Words = "objects") -> Check:
    """The check of what the first method of a decode wrote, from the states that its prefill left: no forward pass."""
    vision, tokenizer, answer = decode.vision, decode.tokenizer, decode.answers[0]
    model, head = (None, None) if vision is None else (vision.model(), vision.head())
    if vision is None or model is None or head is None or tokenizer is None:
        raise RevisitError("The model was released before this check: keep it loaded, or call revisit.check.")
    asked = word_test(words)
    settings, notes = settings_of(model)
    tokens = [step.token for step in answer.steps]
    decoded, spans = token_spans(tokenizer, tokens)
    shift = len(decoded) - len(decoded.lstrip())
    likely = {n: [(c.token, c.base) for c in step.candidates] for n, step in enumerate(answer.steps)}
    chances = [dict(likely[n]).get(token) for n, token in enumerate(tokens)]
    logs = [math.log(chance) if chance else None for chance in chances]
    places = word_places(answer.text, [(a - shift, b - shift) for a, b in spans])
    states = vision.at(vision.layers.index(settings["layer"]))[0]
    written = Written(answer.text, tokens, places, logs, likely)
    found = support(head, tokenizer, written, states, decode.layout, asked)
    return Check(answer.text, found, settings["threshold"], decode.model, decode.images, notes)


def word_places(text: str, spans: Sequence[Span]) -> list[tuple[int, int, list[int]]]:
    """(start, end, numbers of the tokens that write it) of each word of a text."""
    found = [(*match.span(), writers(spans, *match.span())) for match in WORD.finditer(text)]
    return [place for place in found if place[2]]


def word_test(words: Words) -> Callable[[str], bool]:
    """Whether a word is to be checked, as a function."""
    if words == "objects":
        return lambda word: object_words().fullmatch(word) is not None
    if words == "content":
        return is_content
    if isinstance(words, str) or not isinstance(words, Iterable) or not all(isinstance(word, str) for word in words):
        raise RevisitError(f"words must be 'objects', 'content' or a list of words, not {words!r}.")
    listed = {word.strip().lower() for word in words}
    if not listed - {""}:
        raise RevisitError("The list of words to check is empty.")
    return lambda word: word.lower() in listed


def is_content(word: str) -> bool:
    """Whether a word is made of letters and is not a function word or a count."""
    letters = re.sub(r"['’-]", "", word)
    return letters.isalpha() and word.lower() not in STOP and (len(letters) > 1 or not letters.isascii())


@torch.no_grad()
def say(head: Head, states: Tensor, ids: Sequence[int]) -> Tensor:
    """The probability, over the whole vocabulary, that each vision token gives to some tokens.  (n, d) -> (n, ids)"""
    columns = torch.tensor(list(ids), device=head.device)
    parts = [(logits[:, columns] - logits.logsumexp(-1, keepdim=True)).exp() for logits in logit_slices(head, states)]
    return torch.cat(parts)


def support(
    head: Head,
    tokenizer: Tokenizer,
    written: Written,
    states: Tensor,
    places: Layout,
    asked: Callable[[str], bool],
) -> list[Word]:
    """The words of a text with their support by the vision tokens' states (n, d), which lie on the picture at `places`."""
    text, tokens = written.text, written.tokens
    # A word of several tokens has the support of its first, which distinguishes most words.
    firsts = [
        first_tokens(tokenizer, text[start:end], tokens[own[0]]) if asked(text[start:end]) else [tokens[own[0]]]
        for start, end, own in written.words
    ]
    rivals = [_rivals(tokenizer, written.likely.get(own[0], ()), tokens[own[0]], asked) for _, _, own in written.words]
    ids = sorted({token for group in (*firsts, *rivals) for token in group})
    number = {token: n for n, token in enumerate(ids)}
    table = say(head, states, ids)  # (vision tokens, ids)
    supports = table.topk(min(TOP, len(table)), dim=0).values.mean(0).tolist()
    best = table.argmax(0).tolist()
    found = []
    for (start, end, own), ways, others in zip(written.words, firsts, rivals, strict=True):
        value, first = max((supports[number[token]], token) for token in ways)
        region = places.region(best[number[first]])
        known = [log for n in own if (log := written.logs[n]) is not None]
        chance = math.exp(sum(known)) if len(known) == len(own) else None
        scores = {token: supports[number[token]] * p for token, p in others.items()}
        rival = max(scores, key=scores.__getitem__, default=None)
        beaten = rival is not None and chance is not None and scores[rival] > value * math.exp(known[0])
        found.append(
            Word(
                text=text[start:end],
                start=start,
                end=end,
                support=value,
                checkable=asked(text[start:end]),
                probability=chance,
                instead=token_text(tokenizer, rival).strip() if rival is not None and beaten else None,
                token=best[number[first]],
                image=0 if region is None else region.image,
                row=None if region is None else region.row,
                column=None if region is None else region.column,
                box=None if region is None else [round(edge, 1) for edge in region.box],
            )
        )
    return found


def _rivals(
    tokenizer: Tokenizer, likely: Iterable[tuple[int, float]], token: int, asked: Callable[[str], bool]
) -> dict[int, float]:
    """The words that are asked for among the model's plausible tokens, with their probabilities."""
    pairs = dict(likely)
    least = PLAUSIBLE * max(pairs.values(), default=0)
    texts = {t: token_text(tokenizer, t) for t, chance in pairs.items() if chance >= least and t != token}
    return {t: pairs[t] for t, text in texts.items() if text[:1].isspace() and asked(text.strip())}


def first_tokens(tokenizer: Tokenizer, word: str, token: int) -> list[int]:
    """The first token as written, and that of the word in lower case inside a sentence, which is how vision tokens say it."""
    return list(dict.fromkeys([token, *word_tokens(tokenizer, word.lower())[:1]]))
