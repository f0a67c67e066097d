"""Measure how far the vision tokens support the words of a text.

Image, prompt and text run through the model once (teacher forcing). Each vision token, read through the model's own head, gives
a word's first token a probability over the whole vocabulary. The support of the word is the mean of the `TOP` largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.explain.checkable import WORD
from revisit.explain.checked import Word
from revisit.explain.prefill import PromptStates, force
from revisit.forward.support import token_support
from revisit.models.geometry import Layout, layout_of
from revisit.models.prompts import check_no_image_tokens
from revisit.models.tokens import Span, token_spans, tokens_in, word_tokens
from revisit.video.clip import shown_images

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Inputs, Model, Processor, Tokenizer
    from revisit.video.clip import Visual


@dataclass(frozen=True)
class ModelText:
    """A text in a model's tokens, with the states of the prompt that it answers."""

    text: str
    tokens: Sequence[int]
    spans: Sequence[Span]  # the characters of the text that each token covers
    images: list[Image]
    layout: Layout
    states: PromptStates

    @property
    def words(self) -> list[tuple[int, int, list[int]]]:
        """Start, end and token positions of each word."""
        spans = [match.span() for match in WORD.finditer(self.text)]
        return [(start, end, covered) for start, end in spans if (covered := tokens_in(self.spans, start, end))]


def answer_text(
    tokenizer: Tokenizer, text: str, tokens: Sequence[int], images: list[Image], layout: Layout, states: PromptStates
) -> ModelText:
    """Return an answer that the model generated; `text` is its decoded tokens, stripped, or the beginning of them."""
    decoded, spans = token_spans(tokenizer, tokens)
    leading = len(decoded) - len(decoded.lstrip())
    return ModelText(text, tokens, [(start - leading, end - leading) for start, end in spans], images, layout, states)


def read_texts(
    model: Model,
    processor: Processor,
    inputs: Inputs,
    prompts: Sequence[str],
    visuals: Sequence[Sequence[Visual]],
    texts: Sequence[str],
    layers: Sequence[int],
) -> list[ModelText]:
    """Run each text after its prompt in one forward pass, and keep the vision tokens' states at `layers`.

    `prompts` are rendered, and `inputs` encodes them with their images and videos.
    """
    encoded = [encode_text(processor, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    forced = force(model, inputs, [tokens for tokens, _ in encoded], layers)
    return [
        ModelText(
            texts[row],
            *encoded[row],
            shown_images(visuals[row]),
            layout_of(model, processor, visuals, inputs, row),
            states,
        )
        for row, states in enumerate(forced)
    ]


def encode_text(processor: Processor, prompt: str, text: str) -> tuple[list[int], list[Span]]:
    """Return the tokens that continue a prompt with this text, and the characters of the text that each token covers."""
    check_no_image_tokens(processor, "text", text)
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise RevisitError("The model's tokenizer has no character offsets; load a fast tokenizer.")
    # An answer begins with a space after "ASSISTANT:", but not after a line break or a special token.
    space = "" if prompt[-1:] in ("", ">", "]") or prompt[-1].isspace() or text[0].isspace() else " "
    whole = tokenizer(prompt + space + text, add_special_tokens=False, return_offsets_mapping=True)
    before = len(prompt) + len(space)
    pairs = [
        (int(token), (max(start - before, 0), end - before))
        for token, (start, end) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        if end > before
    ]
    return [token for token, _ in pairs], [span for _, span in pairs]


def support(text: ModelText, layer: int, tokenizer: Tokenizer, is_checked: Callable[[str], bool]) -> list[Word]:
    """Return the words of a text with their support at a layer; `is_checked` selects the words to check."""
    words = [(text.text[start:end], start, end, text.tokens[positions[0]]) for start, end, positions in text.words]
    if not words:
        return []
    checked = [is_checked(word) for word, *_ in words]
    # A word of several tokens has the support of its first one, which distinguishes most words.
    firsts = [
        first_tokens(tokenizer, word, token) if checkable else [token]
        for (word, _, _, token), checkable in zip(words, checked, strict=True)
    ]
    ids = sorted({token for tokens in firsts for token in tokens})
    supports = token_support(text.states.head, text.states.vision[layer], ids)
    found = []
    for (word, start, end, _), checkable, tokens in zip(words, checked, firsts, strict=True):
        value, vision_token = max(supports[token] for token in tokens)
        patch = _patch(text.layout, vision_token) if checkable else {}
        found.append(Word(word, start, end, value, checkable, vision_token, **patch))
    return found


def _patch(layout: Layout, vision_token: int) -> dict[str, Any]:
    """Return the patch of a vision token as fields of a `Word`."""
    region = layout.region(vision_token)
    if region is None:
        return {}
    box = [round(edge, 1) for edge in region.box]
    place = {"image": region.image + 1, "patch_row": region.row + 1, "patch_col": region.column + 1}
    return {**place, "box": box, "time": region.time}


def first_tokens(tokenizer: Tokenizer, word: str, token: int) -> list[int]:
    """Return a word's first token as written, and that of its lower-case form after a space, which vision tokens favor."""
    return list(dict.fromkeys([token, *word_tokens(tokenizer, word.lower())[:1]]))
