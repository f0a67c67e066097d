"""What the methods share that change the model's attention to the image and decode plainly by what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from revisit.decoding.method import Method
from revisit.errors import RevisitError

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run
    from revisit.taps.attention import AttentionHook, Call


def layers_of_32(first: int, last: int, depth: int) -> tuple[int, ...]:
    """Decoder layers at the relative depth of `first` to `last` of 32, the published ones of LLaVA-1.5-7B."""
    start, end = (min(round(layer * depth / 32), depth - 1) for layer in (first, last))
    return tuple(range(start, end + 1))


class Attending(Method):
    """A method that changes the attention of some decoder layers."""

    def check_layers(self, layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
        """These layers; raises RevisitError if the decoder does not have them all."""
        if max(layers) >= depth:
            raise RevisitError(
                f"{type(self).__name__}: layer {max(layers)} does not exist: this model's decoder layers are numbered 0 to {depth - 1}."
            )
        return layers

    def attending(self, run: Run, mask: Tensor, layers: tuple[int, ...], change: AttentionHook) -> Refine:
        """The step of such a method: `change` is asked about every attention call of these layers on the clean rows."""
        from revisit.taps.attention import watching

        name, has_image, seen = type(self).__name__, mask.any(-1), set[int]()
        run.check_sliding_windows(name)

        def attention_hook(call: Call) -> Callable[[Tensor], Tensor] | None:
            if call.layer not in layers or run.contrasting:
                return None
            seen.add(call.layer)
            return change(call)

        run.stack.enter_context(watching(run.parts, attention_hook, name))

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            if not seen:
                raise RevisitError(
                    f"{name}: this model computes its attention without transformers' attention interface, so it could not be changed: "
                    "use another method."
                )
            run.recorder.note_scores(input_ids, logits, logits, acted=has_image)
            return logits

        return refine
