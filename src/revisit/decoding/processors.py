"""How the other logits processors of a call are applied to a method's scores, in every decoding loop.

A method may exclude tokens, and what it leaves may be excluded by another processor. Such a row is decoded plainly at this
step: by the model's own scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import logits_process

from revisit.decoding.floor import Floor
from revisit.forward.passes import Passes
from revisit.forward.states import one_call

# The processors of transformers that keep state or call a function of the user's.
CALLED_ONCE = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
GAP = 30.0  # between a method's best score and what it excludes: e^-30 is nothing beside 1 in float32


class Repeatable(LogitsProcessor):  # type: ignore[misc]
    """A processor that may be called twice at a step: with the method's scores, and with the model's own."""


class OtherProcessors(LogitsProcessor):  # type: ignore[misc]
    """Apply the call's other processors to a method's scores; rows with no token left are decoded plainly instead.

    Two versions of the scores pass through the processors: the method's, and the model's own. Transformers' processors are applied
    to each of them. Any other processor may keep state, so it is called once, with a mixture of both, and the tokens that the
    method excludes are removed from its result.

    On a GPU, the model's own scores are always computed: reading whether a row needs them would make the host wait.
    """

    def __init__(
        self,
        passes: Passes,
        config: GenerationConfig,
        processors: Sequence[LogitsProcessor],
        floor: Floor | None = None,
        *,
        checks_drafts: bool = False,
    ) -> None:
        self.passes, self.config, self.floor = passes, config, floor
        self.repeatable = LogitsProcessorList(filter(_is_repeatable, processors))
        self.once: list[tuple[LogitsProcessorList, LogitsProcessorList]] = []  # and the repeatable ones before each
        self.last = LogitsProcessorList()  # the repeatable ones after these
        for processor in processors:
            if _is_repeatable(processor):
                self.last.append(processor)
            else:
                self.once.append((self.last, LogitsProcessorList([processor])))
                self.last = LogitsProcessorList()
        predictable = not config.do_sample and getattr(config, "assistant_ensemble_weight", None) is None
        self._follows = checks_drafts and predictable and bool(self.once)
        self._expected: Tensor | None = None  # (1, length) the tokens of the next step that counts

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if self.floor is not None:
            scores = self.floor(input_ids, scores)
        elif not self.once and not self.last and not self.config.do_sample:
            return scores
        if self._expected is not None and not torch.equal(input_ids, self._expected):
            return scores  # this position follows a drafted token that has just been rejected
        plain = self.passes.raw
        for before, processor in self.once:
            scores, plain = before(input_ids, scores), before(input_ids, plain)  # type: ignore[arg-type]
            scores, plain = self._call_once(processor, input_ids, scores, plain)
        chosen = self.last(input_ids, scores)  # type: ignore[arg-type]
        empty = ~(chosen.amax(-1) > -torch.inf)  # (rows,), also where warpers returned NaN for an empty set
        if not chosen.is_cpu or bool(empty.any()):
            chosen = torch.where(empty[:, None], self._plainly(input_ids, plain, empty), chosen)
        if self._follows:
            self._expected = torch.cat([input_ids, chosen.argmax(-1, keepdim=True)], dim=1)
        return chosen

    def _plainly(self, input_ids: Tensor, plain: Tensor, empty: Tensor) -> Tensor:
        """Return the model's own scores after the processors, without withheld names unless nothing else is left."""
        if self.floor is None:
            return self.last(input_ids, plain)  # type: ignore[no-any-return, arg-type]
        chosen = self.last(input_ids, self.floor.without(plain))  # type: ignore[arg-type]
        overruled = empty & ~(chosen.amax(-1) > -torch.inf)
        self.floor.count(empty, overruled)
        return torch.where(overruled[:, None], self.last(input_ids, plain), chosen)  # type: ignore[arg-type]

    def _call_once(
        self, processor: LogitsProcessorList, input_ids: Tensor, scores: Tensor, plain: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the method's scores and the model's own after a processor that is called once.

        It sees the model's own scores where the method excludes a token, far below the method's best. Beams are compared with each
        other, so their scores, which are log-probabilities, are not moved.
        """
        kept = scores > -torch.inf
        down = (plain.amax(-1, keepdim=True) - scores.amax(-1, keepdim=True) + GAP).clamp(min=0)  # (rows, 1)
        down = torch.where(kept.any(-1, keepdim=True) & down.isfinite() & (self.config.num_beams == 1), down, 0.0)
        with one_call():  # it may run the model
            plain = processor(input_ids, scores.where(kept, plain - down))  # type: ignore[arg-type]
        return plain.masked_fill(~kept, -torch.inf), plain.where(kept, plain + down)


def _is_repeatable(processor: LogitsProcessor) -> bool:
    own = type(processor).__module__ == logits_process.__name__ and not isinstance(processor, CALLED_ONCE)
    return own or isinstance(processor, Repeatable)
