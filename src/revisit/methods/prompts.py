"""What methods share that rewrite the prompt: the tokens around an image, and words that need a tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.models import templates
from revisit.models.families import VISION_TOKEN_IDS

if TYPE_CHECKING:
    from typing_extensions import Self

    from revisit.decoding.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Boundaries(Method):
    """A method that takes the image out of the prompt.

    around: ids of tokens that open and close an image, taken out with it where they touch it, beside those that the
        model's configuration declares (Qwen-VL, GLM-V and Gemma do; for InternVL's, use `bind(processor)` or list them).
    """

    around: tuple[int, ...] = field(default=(), kw_only=True)

    def bind(self, processor: Any) -> Self:
        """This method with the processor's image boundaries known."""
        from revisit.contrast.prompt_edits import declared_boundaries

        found = declared_boundaries(processor)
        return dataclasses.replace(self, around=tuple(dict.fromkeys([*self.around, *found])))

    def boundaries(self, run: Run) -> tuple[int, ...]:
        from revisit.contrast.prompt_edits import declared_boundaries

        return (*self.around, *declared_boundaries(run.model.config))

    def check_ids(self, run: Run, ids: Iterable[int], field: str) -> None:
        """Raises RevisitError unless these are ids of text: in the vocabulary, and none that stands for an image."""
        config = run.model.config
        size = run.model.get_input_embeddings().weight.shape[0]
        images = {getattr(config, name, None) for name in VISION_TOKEN_IDS}
        for token in ids:
            if not 0 <= token < size or token in images:
                raise RevisitError(
                    f"{type(self).__name__}: {field} holds {token}, which is no text token of this model (0 to {size - 1})."
                )


def word_ids(processor: Any, words: str) -> tuple[int, ...]:
    """Token ids of some words, without the tokens that begin or end a text."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RevisitError(f"The processor's tokenizer makes no tokens of {words!r}.")
    return tuple(int(i) for i in ids)


def around_image(processor: Any, words: str, system: str | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A request about one image in the processor's chat format: the token ids before and after the image.

    Tokens that open and close the image belong to neither: they are taken from the prompt that is decoded.
    """
    from revisit.contrast.prompt_edits import declared_boundaries

    tokenizer = getattr(processor, "tokenizer", processor)
    placeholder = _placeholder(processor, tokenizer)
    if _has_chat_format(processor, tokenizer):
        content = [{"type": "image"}, {"type": "text", "text": words}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        text = templates.render(processor, turns, add_generation_prompt=True)
    else:
        text = f"{placeholder}\n{words}" if system is None else f"{system} {placeholder}\n{words}"
    ids = tokenizer(text, add_special_tokens=not text.startswith(tokenizer.bos_token or "\0"))["input_ids"]
    marks = _image_marks(processor, tokenizer, placeholder)
    places = [i for i, token in enumerate(ids) if token in marks]
    if not places:
        raise RevisitError(
            f"The processor's chat format has no {placeholder!r} token for an image, so the request for a description cannot be built: "
            "pass request_ids."
        )
    head, tail, edges = ids[: places[0]], ids[places[-1] + 1 :], {*declared_boundaries(processor), *marks}
    while head and head[-1] in edges:
        head = head[:-1]
    while tail and tail[0] in edges:
        tail = tail[1:]
    return tuple(head), tuple(tail)


def system_turn(processor: Any, words: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before the first user's turn with words as the system message, and the tokens that open that turn.

    Both are empty where the processor has no chat format, or one that takes no system message.
    """
    if not _has_chat_format(processor, getattr(processor, "tokenizer", processor)):
        return (), ()
    try:
        plain, _ = around_image(processor, "?")
        told, _ = around_image(processor, "?", words)
    except RevisitError as error:
        logger.info("The chat format takes no system message (%s).", error)
        return (), ()
    same = 0
    while same < min(len(plain), len(told)) and plain[-1 - same] == told[-1 - same]:
        same += 1
    if not same or told == plain:
        return (), ()
    return told[: len(told) - same], told[len(told) - same :]


def space_after_image(processor: Any) -> bool:
    """Whether the processor's chat format has white space between an image and the question behind it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    _, tail = around_image(processor, "?")
    return bool(str(tokenizer.decode(list(tail)))[:1].isspace())


def _has_chat_format(processor: Any, tokenizer: Any) -> bool:
    return bool(getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None))


def _placeholder(processor: Any, tokenizer: Any) -> str:
    return getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None) or "<image>"


def _image_marks(processor: Any, tokenizer: Any, placeholder: str) -> set[int]:
    """Ids that stand for an image, or open and close one, in a processor's prompts."""
    names = ("image_token_id", "boi_token_id", "image_start_token_id", "image_end_token_id")
    ids = {value for name in names if isinstance(value := getattr(processor, name, None), int)}
    for word in (placeholder, getattr(processor, "boi_token", None), "<|vision_start|>", "<|vision_end|>"):
        token = tokenizer.convert_tokens_to_ids(word) if word else None
        if isinstance(token, int) and token >= 0 and token != tokenizer.unk_token_id:
            ids.add(token)
    return ids


def starts_with_bos(processor: Any) -> int | None:
    """The id that the tokenizer writes before every text, or None."""
    tokenizer = getattr(processor, "tokenizer", processor)
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None
