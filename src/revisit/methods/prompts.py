"""What methods share that rewrite the prompt: the tokens around an image, and words that need a tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.methods.base import Method

if TYPE_CHECKING:
    from typing_extensions import Self

    from revisit.decoding import Run


@dataclass(frozen=True)
class Boundaries(Method):
    """A method that takes the image out of the prompt.

    around: ids of tokens that open and close an image, taken out with it where they touch it, beside those that the
        model's configuration declares (Qwen-VL, GLM-V and Gemma do; for InternVL's, use `bind(processor)` or list them).
    """

    around: tuple[int, ...] = field(default=(), kw_only=True)

    def bind(self, processor: Any) -> Self:
        """This method with the processor's image boundaries known."""
        from revisit.prompt import declared_boundaries

        found = declared_boundaries(processor)
        return dataclasses.replace(self, around=tuple(dict.fromkeys([*self.around, *found])))

    def boundaries(self, run: Run) -> tuple[int, ...]:
        from revisit.prompt import declared_boundaries

        return (*self.around, *declared_boundaries(run.model.config))


def word_ids(processor: Any, words: str) -> tuple[int, ...]:
    """Token ids of some words, without the tokens that begin or end a text."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RevisitError(f"The processor's tokenizer makes no tokens of {words!r}.")
    return tuple(int(i) for i in ids)
