"""What methods share that rewrite the prompt: the tokens around an image, and words that need a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.models import families, templates
from revisit.models.types import Processor

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.run import Run

logger = logging.getLogger(__name__)


class Boundaries(Method):
    """A method that takes the image out of the prompt.

    Args:
        around: Ids of the tokens that open, close and divide an image, which belong to it where they touch it. None takes those
            of the model's family; empty means that there are none.
    """

    around: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] | None = None

    def boundaries(self, run: Run) -> tuple[int, ...]:
        """Ids of the tokens around an image in this model's prompts; raises RevisitError if they are not known."""
        if self.around is not None:
            return self.around
        family = families.of(run.model.config.model_type)
        if family.image_edges is None:
            raise RevisitError(
                f"{type(self).__name__} needs to know which tokens open and close an image in the prompts of {type(run.model).__name__}, "
                "which are unknown for this family: pass their ids as around, or an empty list if there are none."
            )
        return tuple(sorted(families.edge_ids(run.processor.tokenizer, family))) if family.image_edges else ()

    def without_image(self, run: Run, mask: Tensor) -> dict[str, Any]:
        """The inputs of the prompt without its image; `mask` are the vision positions (rows, T)."""
        from revisit.contrast.prompt_edits import edited, without_image

        around = self.boundaries(run)
        return edited(run, mask, lambda _, ids, vision: without_image(ids, vision, around), pixels=False)

    def text_ids(self, run: Run, ids: Sequence[int]) -> Tensor:
        """Token ids as a tensor (n,); raises RevisitError for an id that is not in the vocabulary, or marks an image."""
        size = run.model.get_input_embeddings().weight.shape[0]
        for token in ids:
            if not 0 <= token < size or token in run.parts.vision_ids:
                raise RevisitError(
                    f"{type(self).__name__}: its words contain token {token}, which is not a text token of this model (0 to {size - 1})."
                )
        return run.input_ids.new_tensor(ids)


def word_ids(processor: Processor, words: str) -> tuple[int, ...]:
    """Token ids of some words, without the tokens that begin or end a text."""
    tokenizer = processor.tokenizer
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RevisitError(f"The processor's tokenizer returns no tokens for {words!r}.")
    return tuple(int(i) for i in ids)


def around_image(
    processor: Processor, words: str, system: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A request about one image in the processor's chat format: the token ids before and after the image.

    Tokens that open and close the image belong to neither: they are taken from the prompt that is decoded.
    """
    tokenizer = processor.tokenizer
    placeholder = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None) or "<image>"
    if _has_chat_format(processor):
        content = [{"type": "image"}, {"type": "text", "text": words}]
        turns: list[templates.Message] = [{"role": "user", "content": content}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        text = templates.render(processor, turns)
    else:
        text = f"{placeholder}\n{words}" if system is None else f"{system} {placeholder}\n{words}"
    ids = tokenizer(text, add_special_tokens=not text.startswith(tokenizer.bos_token or "\0"))["input_ids"]
    marks = {tokenizer.convert_tokens_to_ids(placeholder), *families.edge_ids(tokenizer)} - {tokenizer.unk_token_id}
    places = [i for i, token in enumerate(ids) if token in marks]
    if not places:
        raise RevisitError(
            f"The processor's chat format has no {placeholder!r} token for an image, so a request about it cannot be written: use another "
            "method."
        )
    return tuple(ids[: places[0]]), tuple(ids[places[-1] + 1 :])


def system_turn(processor: Processor, words: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before the first user's turn with words as the system message, and the tokens that open that turn.

    Both are empty where the processor has no chat format, or one that takes no system message.
    """
    if not _has_chat_format(processor):
        return (), ()
    try:
        plain, _ = around_image(processor, "?")
        with_words, _ = around_image(processor, "?", words)
    except RevisitError as error:
        logger.info("The chat format takes no system message (%s).", error)
        return (), ()
    same = 0
    while same < min(len(plain), len(with_words)) and plain[-1 - same] == with_words[-1 - same]:
        same += 1
    if not same or with_words == plain:
        return (), ()
    return with_words[: len(with_words) - same], with_words[len(with_words) - same :]


def space_after_image(processor: Processor) -> bool:
    """Whether the processor's chat format has white space between an image and the question behind it."""
    tokenizer = processor.tokenizer
    _, tail = around_image(processor, "?")
    return bool(str(tokenizer.decode(list(tail)))[:1].isspace())


def _has_chat_format(processor: Processor) -> bool:
    return bool(getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None))


def starts_with_bos(processor: Processor) -> tuple[int, ...]:
    """The id that the tokenizer writes before every text, if it writes one."""
    tokenizer = processor.tokenizer
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else ()
