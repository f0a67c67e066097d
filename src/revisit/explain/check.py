"""Which words of a text does the picture support? `revisit.check` asks the vision tokens of any model, in one forward pass.

The picture, the prompt and the text run through the model once (teacher forcing). A word is supported as far as some vision tokens
say it: read through the model's own head, they give its tokens a high probability over the whole vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from revisit.benchmarks.chair_words import object_words
from revisit.embedded.familiar import NOTICE, advice, unlike_scenes
from revisit.errors import RevisitError, as_path
from revisit.explain.tokens import Span, token_spans, token_text
from revisit.models import DESCRIBE
from revisit.models.config import is_embedded, name_of
from revisit.models.geometry import Layout, layout
from revisit.models.images import open_image
from revisit.models.loading import loaded_pair
from revisit.models.parts import Head, ModelParts, describe
from revisit.models.prompts import chat_text, prepare, vision_texts
from revisit.step.reference import CHUNK_NUMBERS
from revisit.taps.forcing import forced_inputs, last_logits, last_states
from revisit.taps.states import Capture, no_image, saved_positions, vision_mask

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
    found: list[Check] = []
    for start in range(0, len(texts), batch_size):
        part = slice(start, start + batch_size)
        for forced in force(loaded, processor, pictures[part], texts[part], prompt or DESCRIBE, [settings["layer"]]):
            found.append(_checked(loaded, processor.tokenizer, forced, settings, notes, asked))
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


@dataclass
class ForcedText:
    """A text that a model was made to write, with the states that the pass left."""

    text: str
    tokens: list[int]
    spans: list[Span]  # of each token in the text
    vision: dict[int, Tensor]  # layer -> (vision tokens, d)
    states: Tensor  # (tokens, d), each of which predicts a token
    images: list[Image]
    layout: Layout


@torch.no_grad()
def force(
    model: Model,
    processor: Processor,
    images: Sequence[Sequence[Image]],
    texts: Sequence[str],
    prompt: str,
    layers: Sequence[int],
) -> list[ForcedText]:
    """One forward pass over pictures and texts: the vision tokens' states at these layers, and the text's final states."""
    parts = ModelParts.of(model)
    written = [encode_text(processor, prompt, len(own), text) for own, text in zip(images, texts, strict=True)]
    inputs = prepare(processor, [prompt] * len(texts), [list(own) for own in images], model.device)
    start = inputs["input_ids"].shape[1]
    longest = max(range(len(texts)), key=lambda row: len(written[row][0]))
    _check_length(model, start + len(written[longest][0]))
    if any(bool(vision_mask(torch.tensor(tokens), parts.vision_ids).any()) for tokens, _ in written):
        raise RevisitError("The text contains a token that stands for an image in this model; leave it out.")
    longer = forced_inputs(dict(inputs), [tokens for tokens, _ in written])
    mask = vision_mask(inputs["input_ids"], parts.vision_ids)  # of the prompt; the text has no vision tokens
    mask = torch.nn.functional.pad(mask, (0, longer["input_ids"].shape[1] - start))
    if not bool(mask.any(-1).all()):
        raise no_image(model)
    with ExitStack() as stack:
        stack.enter_context(saved_positions(model, clear=True))
        seen = stack.enter_context(last_states(parts))
        wanted = tuple(sorted({0, *layers}))
        capture = Capture(parts, mask, wanted, 1, stack)
        outputs = model(**longer, use_cache=False, **last_logits(model))
    assert capture.last is not None
    parts.head.calibrate(capture.last[longest], outputs.logits[longest, -1], describe(model))
    found = []
    for row, (text, (tokens, spans), own) in enumerate(zip(texts, written, images, strict=True)):
        states = seen[0][row, start - 1 : start - 1 + len(tokens)].to(parts.head.device)
        place = _row_layout(model, processor, inputs, row, images, int(mask[row].sum()))
        found.append(ForcedText(text, tokens, spans, capture.items[row].by_layer, states, list(own), place))
    return found


def encode_text(processor: Processor, prompt: str, images: int, text: str) -> tuple[list[int], list[Span]]:
    """The tokens that would continue the prompt with this text, and the characters of the text that each one covers."""
    before = chat_text(processor, prompt, images)
    for token in vision_texts(processor):
        if token in text:
            raise RevisitError(f"The text contains {token!r}, which stands for an image in this model; leave it out.")
    # An answer begins with a blank after "ASSISTANT:", but not after a line break or a special token.
    blank = "" if before[-1:] in ("", ">", "]") or before[-1].isspace() or text[0].isspace() else " "
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        written, spans = token_spans(tokenizer, tokens)
        if written.strip() != text.strip():
            raise RevisitError("The model's tokenizer cannot write this text and say which characters a token covers.")
        shift = (len(text) - len(text.lstrip())) - (len(written) - len(written.lstrip()))
        return tokens, [(a + shift, b + shift) for a, b in spans]
    whole = tokenizer(before + blank + text, add_special_tokens=False, return_offsets_mapping=True)
    at = len(before) + len(blank)
    pairs = [
        (int(token), (max(a - at, 0), b - at))
        for token, (a, b) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        if b > at
    ]
    return [token for token, _ in pairs], [span for _, span in pairs]


def _check_length(model: Model, length: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and length > most:
        raise RevisitError(f"Prompt, picture and text are {length} tokens, but the model reads {most}: split the text.")


def _row_layout(
    model: Model, processor: Processor, inputs: Inputs, row: int, images: Sequence[Sequence[Image]], tokens: int
) -> Layout:
    """The layout of one row of a batch, from its own part of what the processor says about each image."""
    total, first = sum(map(len, images)), sum(map(len, images[:row]))
    own = {
        name: value[first : first + len(images[row])] if isinstance(value, Tensor) and len(value) == total else value
        for name, value in inputs.items()
    }
    sizes = [image.size for image in images[row]]
    return layout(model.config, getattr(processor, "image_processor", None), sizes, tokens, own)


def _checked(
    model: Model,
    tokenizer: Tokenizer,
    forced: ForcedText,
    settings: CheckSettings,
    notes: Sequence[str],
    asked: Callable[[str], bool],
) -> Check:
    """The check of a text from its forward pass."""
    head = ModelParts.of(model).head
    name = name_of(model)
    seen = list(notes)
    if is_embedded(name) and unlike_scenes(head, forced.vision[0], len(forced.images)):
        seen.append(f"{NOTICE} {advice('This picture', flag='')}")
    places = word_places(forced.text, forced.spans)
    starts = [own[0] for start, end, own in places if asked(forced.text[start:end])]
    logs, likely = _own_view(head, forced, starts)
    evidence = Evidence(head, tokenizer, forced.vision[settings["layer"]], forced.layout)
    words = evidence.words(forced.text, forced.tokens, places, logs, likely, asked)
    return Check(forced.text, words, settings["threshold"], name, forced.images, seen)


def check_answer(decode: Decode, words: Words = "objects") -> Check:
    """The check of what the first method of a decode wrote, from the states that its prefill left: no forward pass."""
    vision, tokenizer, answer = decode.vision, decode.tokenizer, decode.answers[0]
    model, head = (None, None) if vision is None else (vision.model(), vision.head())
    if vision is None or model is None or head is None or tokenizer is None:
        raise RevisitError("The model was released before this check: keep it loaded, or call revisit.check.")
    asked = word_test(words)
    settings, notes = settings_of(model)
    tokens = [step.token for step in answer.steps]
    written, spans = token_spans(tokenizer, tokens)
    shift = len(written) - len(written.lstrip())
    likely = {n: [(c.token, c.base) for c in step.candidates] for n, step in enumerate(answer.steps)}
    chances = [dict(likely[n]).get(token) for n, token in enumerate(tokens)]
    evidence = Evidence(head, tokenizer, vision.at(vision.layers.index(settings["layer"]))[0], decode.layout)
    places = word_places(answer.text, [(a - shift, b - shift) for a, b in spans])
    logs = [math.log(chance) if chance else None for chance in chances]
    found = evidence.words(answer.text, tokens, places, logs, likely, asked)
    return Check(answer.text, found, settings["threshold"], decode.model, decode.images, notes)


@torch.no_grad()
def _own_view(
    head: Head, forced: ForcedText, asked: Iterable[int]
) -> tuple[list[float], dict[int, list[tuple[int, float]]]]:
    """The model's log-probability of each token, and its likeliest tokens at the `asked` places."""
    wanted = set(asked)
    logs: list[float] = []
    likely: dict[int, list[tuple[int, float]]] = {}
    for part in forced.states.split(max(1, CHUNK_NUMBERS // head.vocabulary)):
        table = head.all_logits(part).log_softmax(-1)
        best = table.topk(min(CANDIDATES, table.shape[-1]), dim=-1)
        for row, values, ids in zip(table, best.values.exp().tolist(), best.indices.tolist(), strict=True):
            if len(logs) in wanted:
                likely[len(logs)] = list(zip(ids, values, strict=True))
            logs.append(float(row[forced.tokens[len(logs)]]))
    return logs, likely


def word_places(text: str, spans: Sequence[Span]) -> list[tuple[int, int, list[int]]]:
    """(start, end, numbers of the tokens that write it) of each word of a text."""
    found = []
    for match in WORD.finditer(text):
        start, end = match.span()
        writers = [number for number, (a, b) in enumerate(spans) if a < end and b > start]
        if writers:
            found.append((start, end, writers))
    return found


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
    parts = []
    for part in states.to(head.device).split(max(1, CHUNK_NUMBERS // head.vocabulary)):
        logits = head.all_logits(part)
        parts.append((logits[:, columns] - logits.logsumexp(-1, keepdim=True)).exp())
    return torch.cat(parts)


@dataclass(frozen=True)
class Evidence:
    """What the vision tokens of one prompt say."""

    head: Head
    tokenizer: Tokenizer
    states: Tensor  # (vision tokens, d)
    layout: Layout

    def words(
        self,
        text: str,
        tokens: Sequence[int],
        places: Sequence[tuple[int, int, list[int]]],
        logs: Sequence[float | None],
        likely: Mapping[int, Sequence[tuple[int, float]]],
        asked: Callable[[str], bool],
    ) -> list[Word]:
        """The words of a text with their support.

        Args:
            text: The text.
            tokens: Its tokens.
            places: Start, end and numbers of the tokens of each word.
            logs: The model's log-probability of each token, where it is known.
            likely: The model's likeliest tokens and their probabilities at the first tokens of words.
            asked: Whether a word is to be checked.
        """
        spelled = []
        for start, end, own in places:
            written = [tokens[n] for n in own]
            word = text[start:end]
            spelled.append(spellings(self.tokenizer, word, written) if asked(word) else [written])
        rivals = [self._rivals(likely.get(own[0], ()), tokens[own[0]], asked) for _, _, own in places]
        ids = sorted({t for ways in spelled for way in ways for t in way} | {t for some in rivals for t in some})
        number = {token: n for n, token in enumerate(ids)}
        table = say(self.head, self.states, ids)  # (vision tokens, ids)
        support = table.topk(min(TOP, len(table)), dim=0).values.mean(0).tolist()  # of each token
        best = table.argmax(0).tolist()
        words = []
        for (start, end, own), ways, others in zip(places, spelled, rivals, strict=True):
            # A word of several tokens has the support of its first, which tells most words apart.
            value, way = max((support[number[way[0]]], way) for way in ways)
            patch = best[number[way[0]]]
            region = self.layout.region(patch)
            known = [log for n in own if (log := logs[n]) is not None]
            chance = math.exp(sum(known)) if len(known) == len(own) else None
            scores = {t: support[number[t]] * p for t, p in others.items()}
            rival = max(scores, key=scores.__getitem__, default=None)
            beaten = rival is not None and chance is not None and scores[rival] > value * math.exp(known[0])
            words.append(
                Word(
                    text=text[start:end],
                    start=start,
                    end=end,
                    support=value,
                    checkable=asked(text[start:end]),
                    probability=chance,
                    instead=token_text(self.tokenizer, rival).strip() if rival is not None and beaten else None,
                    token=patch,
                    image=0 if region is None else region.image,
                    row=None if region is None else region.row,
                    column=None if region is None else region.column,
                    box=None if region is None else [round(edge, 1) for edge in region.box],
                )
            )
        return words

    def _rivals(
        self, likely: Iterable[tuple[int, float]], token: int, asked: Callable[[str], bool]
    ) -> dict[int, float]:
        """The words of the asked kind among the model's plausible tokens."""
        pairs = dict(likely)
        least = PLAUSIBLE * max(pairs.values(), default=0)
        texts = {t: token_text(self.tokenizer, t) for t, chance in pairs.items() if chance >= least and t != token}
        return {t: pairs[t] for t, text in texts.items() if text[:1].isspace() and asked(text.strip())}


def spellings(tokenizer: Tokenizer, word: str, tokens: list[int]) -> list[list[int]]:
    """The tokens as written, and those of the word in lower case inside a sentence, which is how vision tokens say it."""
    head = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode(f"a {word.lower()}", add_special_tokens=False)
    plain = whole[len(head) :] if whole[: len(head)] == head else []
    return [tokens, plain] if plain and plain != tokens else [tokens]
