"""The fusion of SADT (Wang et al., "Same Attention, Different Truths"): check object words against the attended patches.

When greedy decoding begins and completes an object word, the vision tokens that the newest position attends to most in some
late layers are read through the LM head. If no reading agrees with the word, score = (1 − alpha) · l_patch + alpha · l, with
l_patch the logits of the most attended vision token. The released program decodes a whole answer first and uses masks and the
ground truth to decide which words to fuse in a further run; here every flagged word is fused before it is generated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from revisit.decoding.method import LayerNumbers, Method, Step, StepResult, layers_of
from revisit.errors import RevisitError
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.forward.states import Capture
from revisit.models.head import Head
from revisit.models.types import Tokenizer
from revisit.registry import Count, Share, WholeNumber
from revisit.words import CATEGORIES, WORDS

IRREGULAR = {"calf": "calves", "goose": "geese", "knife": "knives", "loaf": "loaves", "mouse": "mice", "ox": "oxen"}
# The released program: what it adds to CHAIR's synonyms, and plurals that inflect forms in another way.
RELEASED_WORDS = {
    "backpack": ("bag",), "handbag": ("bag",), "tie": ("bow tie",), "motorcycle": ("motor bike",), "snowboard": ("ski",),
    "wine glass": ("cup",), "cup": ("wine glass",), "pizza": ("pie",), "cake": ("birthday cake", "cheesecake", "dessert"),
    "potted plant": ("potted flowers",), "toilet": ("flush toilet",), "laptop": ("mac",), "remote": ("console", "controller"),
    "cell phone": ("iphone",), "oven": ("stove top oven",), "clock": ("alarm",), "vase": ("flower vase",),
}  # fmt: skip
RELEASED_PLURALS = {
    "aircraft": "aircraft", "bronco": "broncoes", "buffalo": "buffaloes", "doberman": "dobermen", "flamingo": "flamingoes",
    "lenovo": "lenovoes", "luggage": "luggage", "oxen": "oxens", "palomino": "palominoes", "pocketknife": "pocketknives",
    "potted flowers": "potted flowerss", "scissors": "scissors", "skis": "skiss", "watercraft": "watercraft",
}  # fmt: skip
PEOPLE = "person"  # left out as in the release: its patches read as clothes and colors
CONTEXT = 12  # tokens before a word that are read with it: "dog" after "hot" is no dog
LOGITS = 1 << 26  # most logits of patches that are computed at once


def plural(word: str) -> str:
    """Return the plural of an English noun, by rule."""
    if word in IRREGULAR or word in IRREGULAR.values() or word.endswith("sheep"):
        return IRREGULAR.get(word, word)
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(s|x|ch|sh)$", word) else "s")


def normal(text: str) -> str:
    """Return a text in lower case, with only ASCII letters, digits and inner blanks."""
    return re.sub(r"[^a-z0-9 ]+", "", text.lower()).strip()


def forms(word: str, released: bool = False) -> frozenset[str]:
    """Return the forms that agree with a word: the word, CHAIR's or the released synonyms for its object, and their plurals."""
    same = [other for other, category in WORDS.items() if category == WORDS.get(word)]
    words, plurals = (word, *same), {}
    if released:
        words, plurals = (*words, *RELEASED_WORDS.get(word, ())), RELEASED_PLURALS
    return frozenset(
        form for one in words for other in (one, plurals.get(one) or plural(one)) if (form := normal(other))
    )


def agreeing(texts: Sequence[str], forms: Iterable[str]) -> list[int]:
    """Return the indices of texts that are part of a form or contain one; empty texts agree with nothing."""
    forms = sorted(forms, key=len)
    joined = "\n".join(forms)
    whole = [form for n, form in enumerate(forms) if not any(shorter in form for shorter in forms[:n])]
    return [n for n, text in enumerate(texts) if text and (text in joined or any(form in text for form in whole))]


@dataclass(frozen=True)
class ObjectWords:
    """The object words that a tokenizer can write, the tokens that may begin one, and the tokens that agree with each."""

    tokenizer: Tokenizer
    begins: Tensor  # (V,) bool
    rows: dict[str, int]  # a word or its plural -> row of `agrees`
    agrees: Tensor  # (kinds, V) bool
    pattern: re.Pattern[str]  # every word, the longest first

    @classmethod
    @functools.lru_cache(maxsize=4)  # up to about 60 MB each
    def of(cls, tokenizer: Tokenizer, words: Sequence[str], size: int, released: bool = False) -> ObjectWords:
        """Find the tokens of these words, by the released synonyms or by CHAIR's, in a tokenizer's vocabulary, padded to `size`."""
        count = min(size, len(tokenizer))  # type: ignore[arg-type]
        texts = [normal(tokenizer.decode([token])) for token in range(count)]
        word_forms = {word: forms(word, released) for word in words}
        kinds = {same: number for number, same in enumerate(dict.fromkeys(word_forms.values()))}
        agrees = torch.zeros(len(kinds), size, dtype=torch.bool)
        for same, number in kinds.items():
            agrees[number, agreeing(texts, same)] = True
        rows = {form: kinds[same] for word, same in word_forms.items() for form in (plural(word), word)}
        encodings = {tokens for form in rows for tokens in _encodings(tokenizer, form)}
        if not encodings:
            raise RevisitError("SADT: this model's tokenizer has none of the words: list others.")
        begins = torch.zeros(size, dtype=torch.bool)
        begins[[tokens[0] for tokens in encodings]] = True
        choice = "|".join(_whole(form) for form in sorted(rows, key=len, reverse=True))
        return cls(tokenizer, begins, rows, agrees, re.compile(choice))

    def begun(self, before: Sequence[int], ahead: Sequence[int]) -> tuple[str | None, bool]:
        """Return the object word that `ahead` begins with after `before`, and whether further tokens could change the result."""
        start, text = self._text(before[-CONTEXT:]), self._text([*before[-CONTEXT:], *ahead])
        begin = len(start if text.startswith(start) else start.rstrip("\ufffd"))  # bytes of an unfinished character
        rest = text[begin:].lstrip()
        begin = len(text) - len(rest)
        if any(form.startswith(rest) for form in self.rows):
            return None, True
        return next((m[0] for m in self.pattern.finditer(text) if m.start() == begin), None), False

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.lower()


def _whole(word: str) -> str:
    """Return the pattern of a word that is not part of a longer one."""
    edges = (r"\b" if edge.isalnum() else "" for edge in (word[0], word[-1]))
    return re.escape(word).join(edges)


def _encodings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of a word at the start of an answer and within it, in lower, title and upper case."""
    article = tokenizer.encode("a", add_special_tokens=False)
    for cased in (word, word.capitalize(), word.upper()):
        alone, after = (tokenizer.encode(text, add_special_tokens=False) for text in (cased, f"a {cased}"))
        after = after[len(article) :] if after[: len(article)] == article else []
        for tokens in (alone, after):
            has_blank = bool(tokens) and not tokenizer.decode(tokens[:1]).strip()  # as a token of its own
            if tokens[has_blank:] and tokenizer.unk_token_id not in tokens:
                yield tuple(tokens[has_blank:])


Words = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=40)], ...], Field(min_length=1, max_length=200)]


class SADT(Method):
    """SADT's fusion; layers, patches and alpha are those of its program.

    Args:
        alpha: Weight of the model's own logits for a flagged word; 0, as released, uses the patch alone.
        layers: Decoder layers (from 0) whose attention and hidden states are used: "late" (20 to 27 of 32, scaled to
            the decoder's depth), "released" (these numbers in decoders that have them), or numbers.
        patches: Number of the most attended vision tokens that are read at each layer.
        evidence: The hidden state of the patch that replaces the logits; None for the eighth from the top, as released (25 of 32).
        words: The words that can be flagged: "objects" (CHAIR's words for COCO objects, without people), "categories" (the names of
            these objects only, with the synonyms and plurals of the released program) or a list.
    """

    alpha: Share = 0.0
    layers: Literal["late", "released"] | LayerNumbers = "late"
    patches: Count = 4
    evidence: WholeNumber | None = None
    words: Literal["objects", "categories"] | Words = "objects"

    name = "sadt"
    summary = "replace an object word that the attended patches do not support by the reading of the most attended one"
    cost = "1 forward; 1 for each token of a word that may be an object's, and head rows for the attended patches"
    source = "Wang et al., Same Attention, Different Truths, CVPR 2026"
    released = {"layers": "released", "words": "categories"}

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        depth, length = prompt.parts.depth, prompt.vision.shape[1]
        layers = layers_of(self, 20, 27, depth)
        evidence = max(depth - 7, 0) if self.evidence is None else self.evidence
        if evidence > depth:
            raise RevisitError(
                f"SADT: hidden state {evidence} does not exist: this model's are numbered 0 (embedding) to {depth}."
            )
        capture = passes.capture(tuple(dict.fromkeys((*layers, evidence))))
        attention: dict[int, Tensor] = {}  # layer -> (rows, T) of the newest position, in the running forward

        def attention_hook(call: Call) -> None:
            call.columns(prompt.vision)  # raises if a sliding window hides a part of the prompt
            attention[call.layer] = call.last_attention()[:, :, :length].mean(1)

        passes.on_attention(attention_hook, layers)
        reader: Reader | None = None

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            nonlocal reader
            if reader is None:
                objects = self._objects(prompt, logits)
                reader = Reader(capture.head(passes.raw), capture, layers, evidence, self.patches, objects)
            kind = reader.object_words(prompt, passes, input_ids, logits)
            if kind is None:
                return StepResult(logits, acted=torch.zeros_like(prompt.has_image), layers=capture.layers)
            scores, flagged = reader.fuse(logits, attention, self.alpha, kind)
            return StepResult(scores, acted=flagged, layers=capture.layers)

        return step

    def _objects(self, prompt: Prompt, logits: Tensor) -> ObjectWords:
        named = CATEGORIES if self.words == "categories" else tuple(WORDS)
        objects = tuple(word for word in named if WORDS[word] != PEOPLE)
        words = objects if isinstance(self.words, str) else tuple(word.lower() for word in self.words)
        return ObjectWords.of(prompt.processor.tokenizer, words, logits.shape[-1], self.words == "categories")


class Reader:
    """Reads the attended patches of a prompt through the LM head, and fuses them with the logits."""

    def __init__(
        self, head: Head, capture: Capture, layers: tuple[int, ...], evidence: int, patches: int, objects: ObjectWords
    ) -> None:
        self.head, self.rows_per_item, self.layers, self.patches = head, capture.rows_per_item, layers, patches
        self.objects = objects
        assert capture.store is not None
        self.states = capture.store  # (items, |J|, N, d)
        self.lens = [capture.layers.index(layer) for layer in layers]
        self.evidence = capture.layers.index(evidence)
        device = self.states.device
        self.begins = objects.begins.to(device)
        self.columns = capture.index(device)[1]  # (items, N) positions of the vision tokens
        self.inside = capture.inside()  # (items, N)

    def object_words(self, prompt: Prompt, passes: Passes, input_ids: Tensor, logits: Tensor) -> Tensor | None:
        """Return the row of `agrees` for the object word that each row begins, -1 for no word; None if no row begins one.

        The host waits once, and once more for each token of a word that is completed.  -> (rows,)
        """
        favorites = logits.argmax(-1)  # (rows,)
        ahead = passes.look_ahead(input_ids, favorites)
        has_image = self.inside.any(-1).repeat_interleave(self.rows_per_item).to(favorites.device)
        begun = (self.begins.to(favorites.device)[favorites] & has_image).tolist()
        rows = [row for row, begins in enumerate(begun) if begins]
        if not rows:
            return None
        before = input_ids[rows, prompt.ids.shape[1] :].tolist()
        words: dict[int, str | None] = {}
        open_rows = dict(zip(rows, before, strict=True))
        longest = max(map(len, self.objects.rows)) + 2  # tokens without letters never complete a word
        with closing(ahead):
            for tokens in islice(ahead, longest):  # (rows, n)
                for row in list(open_rows):
                    word, more = self.objects.begun(open_rows[row], tokens[row].tolist())
                    if not more:
                        words[row] = word
                        del open_rows[row]
                if not open_rows:
                    break
        if not any(words.values()):
            return None
        kind = torch.full_like(favorites, -1)
        for row, word in words.items():
            if word is not None:
                kind[row] = self.objects.rows[word]
        return kind

    def fuse(self, logits: Tensor, attention: dict[int, Tensor], alpha: float, kind: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, and which of the rows with an object word are flagged; `kind` is from `object_words`.

        (rows, V), layers × (rows, T), (rows,) -> (rows, V), (rows,)
        """
        device = self.states.device
        flagged = kind < -1
        rows = (kind >= 0).nonzero().squeeze(-1)  # (n,)
        item = (rows // self.rows_per_item).to(device)
        place = rows.to(device)
        seen = torch.stack([attention[layer].to(device) for layer in self.layers], dim=1)[place]  # (n, layers, T)
        seen = seen.take_along_dim(self.columns[item][:, None], -1)  # (n, layers, N)
        seen = seen.masked_fill(~self.inside[item][:, None], -1.0)
        best = seen.topk(min(self.patches, seen.shape[-1]), dim=-1)  # (n, layers, k)
        lens = torch.tensor(self.lens, device=device)[None, :, None]
        states = self.states[item[:, None, None], lens, best.indices]  # (n, layers, k, d)
        slices = states.flatten(0, 2).split(max(1, LOGITS // logits.shape[-1]))
        readings = torch.cat([self.head.all_logits(part).argmax(-1) for part in slices])  # (n · layers · k,)
        readings = readings.view(len(rows), -1).to(logits.device)  # (n, layers · k)
        real = (best.values >= 0).flatten(1).to(logits.device)
        unsupported = ~(self.objects.agrees.to(kind.device)[kind[rows, None], readings] & real).any(-1)  # (n,)
        top = seen.sum(1).argmax(-1)  # (n,)
        patch = self.head.all_logits(self.states[item, self.evidence, top]).to(logits.device)  # (n, V)
        fused = (1 - alpha) * patch + alpha * logits[rows]
        fused = fused.masked_fill(logits[rows] == -torch.inf, -torch.inf)  # excluded by another method of a chain
        scores = logits.index_copy(0, rows, fused.where(unsupported[:, None], logits[rows]))
        return scores, flagged.index_copy(0, rows, unsupported)
