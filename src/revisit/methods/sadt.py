"""The fusion of SADT (Wang et al., "Same Attention, Different Truths"): where the patches a word attends to do not say the word,
let the most attended one speak.

1. Look where the model's favorite begins an object word. In some late layers, take the vision tokens that the newest position attends
   to most, averaged over heads, and read each by the LM head (no norm) at that layer.
2. If none of these tokens agrees with the word, the word is flagged: score = (1 − alpha) · l_patch + alpha · l, with l_patch the
   head's logits of the vision token that is attended to most over all these layers.

The released program decodes a whole answer first, flags words in it, masks their patches in the image to tell two causes apart, and
fuses in a further run. Here a word is flagged when it is about to be said, and the image is not masked.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from revisit.benchmarks.chair_words import CATEGORIES, WORDS
from revisit.decoding.method import LayerNumbers, Method, Refine
from revisit.errors import RevisitError
from revisit.methods.layers import check_layers, layers_of_32
from revisit.registry import Count, Share, WholeNumber

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.run import Run
    from revisit.models.types import Tokenizer
    from revisit.taps.attention import Call
    from revisit.taps.states import Capture

IRREGULAR = {"calf": "calves", "goose": "geese", "knife": "knives", "loaf": "loaves", "mouse": "mice", "ox": "oxen"}
PEOPLE = "person"  # its patches say clothes and colors, so the release leaves it out


def plural(word: str) -> str:
    """The plural of an English noun, by rule."""
    if word in IRREGULAR or word in IRREGULAR.values() or word.endswith("sheep"):
        return IRREGULAR.get(word, word)
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(s|x|ch|sh)$", word) else "s")


def normal(text: str) -> str:
    """A token's text in lower case, without all but letters, digits and inner blanks."""
    return re.sub(r"[^a-z0-9 ]+", "", text.lower().replace("\u2581", " ").replace("\u0120", " ")).strip()


def forms(word: str) -> frozenset[str]:
    """What a token may say to agree with a word: it, what else CHAIR counts as the same object, and their plurals."""
    same = [other for other, category in WORDS.items() if category == WORDS.get(word)]
    return frozenset(form for one in (word, *same) for other in (one, plural(one)) if (form := normal(other)))


def agreeing(texts: Sequence[str], forms: Iterable[str]) -> list[int]:
    """The places of texts that are part of a form or have one in them; empty texts agree with nothing."""
    forms = sorted(forms, key=len)
    parts = {form[i:j] for form in forms for i in range(len(form)) for j in range(i + 1, len(form) + 1)}
    whole = [form for n, form in enumerate(forms) if not any(shorter in form for shorter in forms[:n])]
    return [place for place, text in enumerate(texts) if text in parts or any(form in text for form in whole)]


@dataclass(frozen=True)
class ObjectTokens:
    """Which tokens of a vocabulary begin an object word, and which tokens agree with it."""

    kind: Tensor  # (2, V) the row of `agrees` for a token that begins an object word, -1 for others; within and at the start of an answer
    agrees: Tensor  # (kinds, V) bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, words: Sequence[str], size: int) -> ObjectTokens:
        """Of a tokenizer's vocabulary, padded to `size`; a word begins with its blank, or at the start of an answer without one."""
        import torch

        known: list[str | None] = tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))  # type: ignore[arg-type]
        texts = [normal(token or "") for token in known]
        begun: tuple[dict[int, frozenset[str]], ...] = ({}, {})  # token -> the forms of all words that it begins
        blank = tokenizer.encode("a", add_special_tokens=False)
        for word in words:
            for written in (word, plural(word)):
                after = tokenizer.encode(f"a {written}", add_special_tokens=False)
                after = after[len(blank) :] if after[: len(blank)] == blank else []
                after = after[int(bool(after) and not texts[after[0]]) :]  # a blank may be a token of its own
                alone = tokenizer.encode(written, add_special_tokens=False)
                for starts, tokens in ((begun[0], after), (begun[1], after), (begun[1], alone)):
                    if tokens and tokenizer.unk_token_id not in tokens:
                        starts[tokens[0]] = starts.get(tokens[0], frozenset()) | forms(word)
        if not begun[1]:
            raise RevisitError("SADT: this model's tokenizer has none of the words: list others.")
        found = [*begun[0].values(), *begun[1].values()]
        kinds = {one: number for number, one in enumerate(dict.fromkeys(found))}
        kind = torch.full((2, size), -1)
        agrees = torch.zeros(len(kinds), size, dtype=torch.bool)
        for row, starts in enumerate(begun):
            for token, one in starts.items():
                kind[row, token] = kinds[one]
        for one, number in kinds.items():
            agrees[number, agreeing(texts, one)] = True
        return cls(kind, agrees)

    def to(self, device: Any) -> ObjectTokens:
        return ObjectTokens(self.kind.to(device), self.agrees.to(device))


# tokenizer -> (words, size of the vocabulary) -> what was found
_FOUND: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[tuple[str, ...], int], ObjectTokens]] = (
    weakref.WeakKeyDictionary()
)


class SADT(Method):
    """Settings of SADT's fusion; layers, patches and alpha are those of its program.

    Args:
        alpha: Weight of the model's own logits where a word is flagged; with 0, as released, the patch speaks alone.
        layers: Decoder layers (from 0) whose attention and hidden states are looked at: "late" (20 to 27 of 32, scaled to the
            decoder's depth) or numbers.
        patches: How many of the most attended vision tokens are read at each layer.
        evidence: The hidden state of the patch that speaks; None for number 25 of 32, scaled.
        words: Which words can be flagged: "objects" (CHAIR's words for COCO objects, without people), "categories" (the names of
            these objects only, as released) or a list.
    """

    alpha: Share = 0.0
    layers: Literal["late"] | LayerNumbers = "late"
    patches: Count = 4
    evidence: WholeNumber | None = None
    words: Literal["objects", "categories"] | Annotated[tuple[str, ...], Field(min_length=1)] = "objects"

    name = "sadt"
    summary = "where the attended patches do not say an object word, the most attended patch decides"
    cost = "1 forward; head rows for the attended patches where an object word begins"
    source = "Wang et al., Same Attention, Different Truths, CVPR 2026"

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """The words that the released program looks for: the names of COCO's categories."""
        return cls(**{"words": "categories", **overrides})

    def begin(self, run: Run) -> Refine:
        mask = run.find_vision_tokens()
        depth, rows, length = run.parts.depth, *mask.shape
        layers = layers_of_32(20, 27, depth) if self.layers == "late" else check_layers(self, self.layers, depth)
        evidence = round(25 * depth / 32) if self.evidence is None else self.evidence
        if evidence > depth:
            raise RevisitError(
                f"SADT: hidden state {evidence} does not exist: this model's are numbered 0 (embedding) to {depth}."
            )
        capture = run.capture(mask, tuple(dict.fromkeys((*layers, evidence))))
        attention: dict[int, Tensor] = {}  # layer -> (rows, T) of the newest position, in the running forward

        def attention_hook(call: Call) -> None:
            if call.layer in layers and not run.contrasting:
                call.columns(mask, run.clean_shift)  # raises where the prompt is not seen whole
                seen = call.last_attention()[:rows, :, run.clean_shift : run.clean_shift + length]
                attention[call.layer] = seen.mean(1)

        run.watch_attention(attention_hook, "SADT")
        reader: list[Reader] = []

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            if not reader:
                run.finish_capture(capture, logits)
                reader.append(Reader(capture, layers, evidence, self.patches, self._objects(run, logits)))
            scores, flagged = reader[0].fuse(logits, attention, self.alpha, start=input_ids.shape[1] == length)
            return run.decode_by(input_ids, logits, scores, acted=flagged)

        return refine

    def _objects(self, run: Run, logits: Tensor) -> ObjectTokens:
        named = CATEGORIES if self.words == "categories" else tuple(WORDS)
        objects = tuple(word for word in named if WORDS[word] != PEOPLE)
        words = objects if isinstance(self.words, str) else tuple(word.lower() for word in self.words)
        tokenizer = run.processor.tokenizer
        found, key = _FOUND.setdefault(tokenizer, {}), (words, logits.shape[-1])
        if key not in found:
            found[key] = ObjectTokens.of(tokenizer, *key)
        return found[key].to(logits.device)


class Reader:
    """What the attended patches of a prompt say, and what follows for the logits."""

    def __init__(
        self, capture: Capture, layers: tuple[int, ...], evidence: int, patches: int, objects: ObjectTokens
    ) -> None:
        self.head, self.copies, self.layers, self.patches = capture.parts.head, capture.copies, layers, patches
        self.objects = objects
        assert capture.store is not None
        self.states = capture.store  # (items, |J|, N, d)
        self.lens = [capture.layers.index(layer) for layer in layers]
        self.evidence = capture.layers.index(evidence)
        device = self.states.device
        self.columns = capture.index(device)[1]  # (items, N) positions of the vision tokens
        self.inside = capture.padded()[1][:, : self.columns.shape[1]]  # (items, N)

    def fuse(self, logits: Tensor, attention: dict[int, Tensor], alpha: float, *, start: bool) -> tuple[Tensor, Tensor]:
        """The scores, and which rows are flagged; `start` is for an answer's first token. The host waits once.

        (rows, V), layers × (rows, T) -> (rows, V), (rows,)
        """
        import torch

        device = self.states.device
        kind = self.objects.kind[int(start)][logits.argmax(-1)]  # (rows,)
        has_image = self.inside.any(-1).repeat_interleave(self.copies).to(kind.device)
        flagged = torch.zeros_like(has_image)
        rows = ((kind >= 0) & has_image).nonzero().squeeze(-1)  # (n,) rows that are about to say an object word
        if not len(rows):
            return logits, flagged
        item = (rows // self.copies).to(device)
        place = rows.to(device)
        seen = torch.stack([attention[layer].to(device) for layer in self.layers], dim=1)[place]  # (n, layers, T)
        seen = seen.take_along_dim(self.columns[item][:, None], -1)  # (n, layers, N)
        seen = seen.masked_fill(~self.inside[item][:, None], -1.0)
        best = seen.topk(min(self.patches, seen.shape[-1]), dim=-1)  # (n, layers, k)
        lens = torch.tensor(self.lens, device=device)[None, :, None]
        states = self.states[item[:, None, None], lens, best.indices]  # (n, layers, k, d)
        said = self.head.all_logits(states.flatten(0, 2)).argmax(-1)  # (n · layers · k,)
        said = said.view(len(rows), -1).to(logits.device)  # (n, layers · k)
        real = (best.values >= 0).flatten(1).to(logits.device)
        lies = ~(self.objects.agrees[kind[rows, None], said] & real).any(-1)  # (n,)
        top = seen.sum(1).argmax(-1)  # (n,)
        patch = self.head.all_logits(self.states[item, self.evidence, top]).to(logits.device)  # (n, V)
        fused = (1 - alpha) * patch + alpha * logits[rows]
        fused = fused.masked_fill(logits[rows] == -torch.inf, -torch.inf)  # what another method has ruled out stays out
        return logits.index_copy(0, rows, fused.where(lies[:, None], logits[rows])), flagged.index_copy(0, rows, lies)
