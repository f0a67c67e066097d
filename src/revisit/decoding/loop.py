"""The one place where a decoding method meets transformers' own `generate()`.

`generate()` prepares everything (cache, expansion for beams, processors, stopping), hands over to the method as its
`custom_generate` callable, and the method hands on to transformers' own sampling or beam loop, with one logits
processor put before all others. No decoding loop is written here and nothing of transformers is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

from revisit.decoding.method import Method
from revisit.decoding.registry import as_method
from revisit.decoding.trace import RowTrace, StepRecord, Trace
from revisit.errors import RevisitError
from revisit.models.geometry import grids
from revisit.models.loading import processor_of
from revisit.models.parts import ModelParts, describe
from revisit.step.reference import Refinement
from revisit.taps.early_exits import EarlyExits
from revisit.taps.vision import Capture, VisionStates, no_image, vision_mask

if TYPE_CHECKING:
    from revisit.decoding.method import Refine

SUPPORTED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
# Processors that always leave something of what they are given.
NEVER_EMPTY = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    LogitNormalization,
)
PIXEL_INPUTS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches", "mm_encoder_outputs")


def generate(model: Any, *args: Any, method: Method | None = None, trace: Trace | None = None, **kwargs: Any) -> Any:
    """`model.generate(...)` decoded by a method; the same arguments and the same return value.

    `method=None` decodes plainly. Pass a `Trace` to see what the method did. Prompts given as `inputs_embeds` need
    `vision_mask`, a (batch, length) mask of their vision positions.
    """
    method = as_method(method, model)
    extra = {} if trace is None else {"trace": trace}
    if kwargs.get("stop_strings") is not None:
        kwargs = _stopping_at_strings(kwargs)
    return model.generate(*args, custom_generate=method, **extra, **kwargs)


def _stopping_at_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of generate() with `stop_strings` as a criterion: transformers loses the tokenizer on the way to a method."""
    strings, tokenizer = kwargs["stop_strings"], kwargs.get("tokenizer")
    if tokenizer is None:
        raise RevisitError("stop_strings needs the model's tokenizer: pass tokenizer=processor.tokenizer.")
    criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
    rest = {name: value for name, value in kwargs.items() if name not in ("stop_strings", "tokenizer")}
    return {**rest, "stopping_criteria": StoppingCriteriaList(criteria)}


@dataclass
class Run:
    """One call of generate, as a method sees it."""

    method: Method
    model: Any
    input_ids: Tensor  # (rows, T) the prompt, already repeated for beams and return sequences
    model_kwargs: dict[str, Any]  # what the loop passes to the model
    inputs: dict[str, Any]  # what the caller passed to generate, before any preparation (pixels, grid sizes, ...)
    generation_config: Any
    copies: int  # consecutive rows that are copies of one item
    trace: Trace
    stack: ExitStack  # closed when the call ends, however it ends
    user_mask: Tensor | None = None  # vision positions given by the caller
    loop_model: Any = None  # what the loop runs; a method may put a stand-in for the model here
    parts: ModelParts = field(init=False)
    beams: bool = False

    def __post_init__(self) -> None:
        self.loop_model = self.loop_model or self.model
        self.beams = self.generation_config.num_beams > 1
        self._finished: Tensor | None = None  # (rows,) rows that the loop has ended, for whatever reason
        self._later: list[tuple[Trace, Tensor]] = []  # counters still on the device
        self._seen = self.input_ids.shape[1]
        self._exits = False  # whether some method looks at early layers
        self.raw: Tensor | None = None  # (rows, V) what the model itself said at this step

    # -- the prompt ---------------------------------------------------------------------------------------------

    def find_vision_tokens(self, *, required: bool = True) -> Tensor:
        """Find the model's parts and the prompt's vision positions (rows, T).

        Refuses prompts without any image, unless the method does not need one (`required=False`).
        """
        self.parts = ModelParts.of(self.model)
        if self.user_mask is not None:
            mask = self.user_mask.to(self.input_ids.device).bool()
            embeds = self.model_kwargs.get("inputs_embeds")
            length = embeds.shape[1] if embeds is not None and not self.input_ids.shape[1] else self.input_ids.shape[1]
            wanted = (self.input_ids.shape[0] // self.copies, length)
            if tuple(mask.shape) != wanted:
                raise RevisitError(
                    f"vision_mask must have the shape of the prompts, {wanted} (batch, length), not {tuple(mask.shape)}."
                )
            mask = mask.repeat_interleave(self.copies, dim=0)
        elif self.model_kwargs.get("inputs_embeds") is not None and self.input_ids.shape[1] == 0:
            if not required:
                return self.input_ids.bool()
            raise RevisitError(
                "The prompt is given as inputs_embeds, which do not say where the vision tokens are: pass vision_mask, a "
                "(batch, length) mask that is True at their positions."
            )
        else:
            mask = vision_mask(self.input_ids, self.parts.vision_ids)
        if not bool(mask.any()):
            if not required:
                return mask
            raise no_image(self.model)
        cached = self.model_kwargs.get("past_key_values")
        has_pixels = any(self.inputs.get(name) is not None for name in (*PIXEL_INPUTS, "inputs_embeds"))
        if not has_pixels and (cached is None or cached.get_seq_length() == 0):
            raise RevisitError(
                "The prompt has placeholders for an image but no pixels came with it: pass everything the processor returned "
                "(model.generate(**inputs))."
            )
        for row, count in zip(self.trace.rows, mask.sum(-1).tolist(), strict=True):
            row.vision_tokens = count
        return mask

    def capture(self, mask: Tensor, layers: tuple[int, ...], *, final_norm: bool = False) -> Capture:
        """Start keeping the states of the vision tokens at these layers; complete after the prefill."""
        self.trace.layers = layers
        cache = self.model_kwargs.get("past_key_values")
        return Capture(self.parts, mask, layers, self.copies, self.stack, final_norm=final_norm, cache=cache)

    def within_windows(self, method_name: str) -> None:
        """Refuses a call that outgrows the sliding window of some layer, where the image's place in attention is not known."""
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        if slides and window and self.generation_config.max_length > window:
            raise RevisitError(
                f"{method_name} changes attention, and some layers of {describe(self.model)} see only the last {window} tokens, fewer "
                f"than the {self.generation_config.max_length} that this call may reach: ask for fewer new tokens, or use another method."
            )

    def early_exits(self, layers: tuple[int, ...], *, final_norm: bool = False) -> EarlyExits:
        """Start projecting the last position's states at these layers, at every step."""
        self.trace.layers = layers
        if self._exits:
            raise RevisitError(
                "Only one method of a chain can look at early layers (DoLa, DeCo): leave one of them out."
            )
        self._exits = True
        return EarlyExits(
            self.parts,
            layers,
            self.input_ids.shape[0],
            self.stack,
            final_norm=final_norm,
            ignore=lambda: getattr(self.loop_model, "contrasting", False),
        )

    def finish_capture(self, capture: Capture, logits: Tensor) -> list[VisionStates]:
        """The captured states of every item, ready to be projected; call at the first step, with its raw logits."""
        capture.release()
        if capture.last is None:
            raise RevisitError(
                f"The prefill of {describe(self.model)} did not pass through its decoder module, so no vision states were seen; "
                "this way of running the model is not supported."
            )
        raw = logits if self.raw is None else self.raw  # another method may have changed the logits before
        self.parts.head.calibrate(capture.last[0], raw[0], describe(self.model))
        shapes = grids(self.model.config, [item.runs() for item in capture.items], self.inputs)
        for number, shape in enumerate(shapes):
            for row in self.trace.rows[number * self.copies : (number + 1) * self.copies]:
                row.grids = shape
        return capture.items

    # -- the steps ----------------------------------------------------------------------------------------------

    def item(self, row: int) -> int:
        """Which item of the batch a row belongs to; beams never cross items."""
        return row // self.copies

    def active(self, input_ids: Tensor) -> list[int]:
        """Rows that have not ended before this step. Beam search replaces ended beams, so there all rows count."""
        ended = self.ended(input_ids)
        return [row for row in range(input_ids.shape[0]) if ended is None or not ended[row]]

    def ended(self, input_ids: Tensor) -> Tensor | None:
        """Rows that have ended before this step, on their device; None where no row can have ended."""
        return None if self.beams or input_ids.shape[1] == self._seen else self._finished

    def end(self, rows: Tensor) -> None:
        """The loop ended these rows, and goes on for the others."""
        self._finished = rows if self._finished is None else self._finished | rows

    def note(
        self,
        row: int,
        *,
        applied: bool = False,
        changed: bool = False,
        set_size: int | None = None,
        record: StepRecord | None = None,
    ) -> None:
        """Count one step of one row."""
        counters = self.trace.rows[row]
        counters.steps += 1
        counters.applied += applied
        counters.changed += changed
        if set_size is not None:
            counters.set_sizes.append(set_size)
        if record is not None:
            counters.records.append(record)

    def note_later(self, input_ids: Tensor, sizes: Tensor, applied: Tensor, changed: Tensor) -> None:
        """Count one step of all rows from (rows,) tensors that the host reads only when the call ends; size -1 is none."""
        ended = self.ended(input_ids)
        counted = torch.ones_like(applied) if ended is None else ~ended.to(applied.device)
        if not self._later:
            self.stack.callback(self._count)
        counts = torch.stack([counted.long(), applied.long(), changed.long(), sizes])
        self._later.append((self.trace, counts))

    def _count(self) -> None:
        """Count what `note_later` kept, in the trace that it belongs to (a chain has one for each of its methods)."""
        now, steps = self.trace, torch.stack([counts for _, counts in self._later]).tolist()
        for (trace, _), step in zip(self._later, steps, strict=True):
            self.trace = trace
            for row, (counted, applied, changed, size) in enumerate(zip(*step, strict=True)):
                if counted:
                    self.note(row, applied=bool(applied), changed=bool(changed), set_size=None if size < 0 else size)
        self.trace = now
        self._later.clear()

    def note_refinement(self, row: int, result: Refinement | None, states: VisionStates) -> None:
        """Count, and on request record, a step that fused two distributions over a plausible set; None: left as it is."""
        if result is None:
            self.note(row)
            return
        record = self._record(row, result, states) if self.trace.record else None
        self.note(row, applied=result.applied, changed=result.changed, set_size=result.size, record=record)

    def note_scores(
        self,
        input_ids: Tensor,
        base: Tensor,
        scores: Tensor,
        other: Tensor | None = None,
        acted: Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Count, and on request record, a step that turned the logits `base` into `scores`, all rows at once.

        The set of a row is where its scores are finite. `other` are the logits that were contrasted with (all (rows, V)),
        `acted` (rows,) says where the method had anything to do, `layers` which hidden state each row used.
        """
        sizes = scores.isfinite().sum(-1)
        applied = sizes > 1 if acted is None else acted.to(sizes.device) & (sizes > 1)
        changed = (scores.argmax(-1) != base.argmax(-1)) & applied
        told = torch.stack([sizes, applied, changed]).tolist()  # one wait for the device a step
        for row in self.active(input_ids):
            size, did, moved = told[0][row], bool(told[1][row]), bool(told[2][row])
            record = None
            if self.trace.record:
                contrast = other[row] if other is not None and did else None
                record = self._record_scores(row, base[row], scores[row], contrast, size)
                record.layer = layers[row] if layers is not None and did else None
            self.note(row, applied=did, changed=moved, set_size=size, record=record)

    def note_plain(self, row: int, logits: Tensor) -> None:
        """Count, and on request record, a step that left the logits (V,) as they are."""
        size = int(logits.isfinite().sum()) if self.trace.record else 0
        self.note(row, record=self._record_scores(row, logits, logits, None, size) if self.trace.record else None)

    def _record_scores(self, row: int, base: Tensor, scores: Tensor, other: Tensor | None, size: int) -> StepRecord:
        """Candidates of one step; every column is a distribution over the row's set."""
        outside = ~scores.isfinite()
        before, after = (x.masked_fill(outside, -torch.inf).softmax(-1) for x in (base.float(), scores.float()))
        order = after.topk(min(size, self.trace.candidates)).indices
        favourite = before.argmax()
        if not bool((order == favourite).any()):
            order = torch.cat([order[:-1], favourite[None]])
        between = None if other is None else other.float().masked_fill(outside, -torch.inf).softmax(-1)[order].tolist()
        return StepRecord(
            step=self.trace.rows[row].steps,
            token=None,
            ids=order.tolist(),
            base=before[order].tolist(),
            vision=between,
            final=after[order].tolist(),
            set_size=size,
        )

    def _record(self, row: int, result: Refinement, states: VisionStates) -> StepRecord:
        final = result.final.softmax(-1)
        order = final.argsort(descending=True, stable=True)[: self.trace.candidates]
        favourite = result.base.argmax()
        if not bool((order == favourite).any()):  # what the model would have said is always shown
            order = torch.cat([order[:-1], favourite[None]])
        record = StepRecord(
            step=self.trace.rows[row].steps,
            token=None,
            ids=result.ids[order].tolist(),
            base=result.base.exp()[order].tolist(),
            vision=None,
            final=final[order].tolist(),
            set_size=len(result.ids),
        )
        if result.applied and result.divergences is not None:
            record.vision = result.vision.exp()[order].tolist()
            record.layer, record.index = states.place(result.state)
            record.divergence = float(result.divergences[result.state])
            record.divergences = result.divergences.float().cpu().view(len(states.layers), states.tokens)
            record.weight = result.weight
        return record

    def finish(self, sequences: Tensor) -> None:
        """Fill in which token was chosen at each recorded step (not for beams: there rows change places)."""
        if not self.trace.record or self.beams:
            return
        start = self.input_ids.shape[1]
        for row, tokens in zip(self.trace.rows, sequences[:, start:].tolist(), strict=True):
            for record, token in zip(row.records, tokens, strict=False):
                record.token = token


class MethodProcessor(LogitsProcessor):
    """The method as the first logits processor: it sees the raw logits, the others see its result."""

    def __init__(self, run: Run, refine: Refine) -> None:
        self.run, self.refine = run, refine

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.run.raw = scores
        return self.refine(input_ids, scores)


class TrackedCriteria(StoppingCriteriaList):
    """The loop's own criteria; what they say of rows is remembered."""

    def __init__(self, run: Run, criteria: Sequence[Any] | None) -> None:
        super().__init__(criteria or [])
        self.run = run

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        ended = super().__call__(input_ids, scores, **kwargs)
        if not self.run.beams:
            self.run.end(ended)
        return ended


class FallbackProcessor(LogitsProcessor):
    """Where the others have ruled out all that the method left, the row is decoded plainly: the others on the raw logits."""

    def __init__(self, run: Run, others: LogitsProcessorList) -> None:
        self.run, self.others = run, others

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        nothing = ~(scores.amax(-1) > -torch.inf)  # (rows,), also where warpers made NaN of nothing
        if not bool(nothing.any()):
            return scores
        assert self.run.raw is not None
        plain: Tensor = self.others(input_ids, self.run.raw)  # type: ignore[arg-type]
        return torch.where(nothing[:, None], plain, scores)


def decode(
    method: Method,
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    trace: Trace | None = None,
    vision_mask: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Run transformers' own loop for this generation mode with the method's processor in front."""
    caller = _arguments_of_generate()
    mode = generation_config.get_generation_mode(caller.get("assistant_model"))
    _refuse(mode, generation_config, caller)
    trace = trace if trace is not None else Trace()
    trace.method = {"name": method.name, **method.settings()}
    trace.rows = [RowTrace() for _ in range(input_ids.shape[0])]
    streamer = caller.get("streamer")
    if (processor := processor_of(model)) is not None:
        method = method.bind(processor)
    with ExitStack() as stack:
        run = Run(
            method=method,
            model=model,
            input_ids=input_ids,
            model_kwargs=model_kwargs,
            inputs=dict(caller.get("kwargs") or {}),
            generation_config=generation_config,
            copies=max(generation_config.num_beams, generation_config.num_return_sequences),
            trace=trace,
            stack=stack,
            user_mask=vision_mask,
        )
        others = LogitsProcessorList(logits_processor or [])
        last = [FallbackProcessor(run, others)] if any(type(other) not in NEVER_EMPTY for other in others) else []
        processors = LogitsProcessorList([MethodProcessor(run, method.begin(run)), *others, *last])
        loop = getattr(type(model), GENERATION_MODES_MAPPING[mode])
        streaming = {} if streamer is None else {"streamer": streamer}
        output = loop(
            run.loop_model,
            input_ids,
            logits_processor=processors,
            stopping_criteria=TrackedCriteria(run, stopping_criteria),
            generation_config=generation_config,
            synced_gpus=bool(caller.get("synced_gpus")),
            **streaming,
            **run.model_kwargs,
        )
        run.finish(output if isinstance(output, Tensor) else output.sequences)
        return output


def _arguments_of_generate() -> dict[str, Any]:
    """The arguments that generate() was called with.

    transformers drops `streamer`, `assistant_model` and `synced_gpus` on the way to a callable `custom_generate`, and
    consumes the pixels before it. They are still in the frame of generate(), which is a caller of ours.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and Path(frame.f_code.co_filename).match(
            "transformers/generation/utils.py"
        ):
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    raise RevisitError(
        "A decoding method is not called directly: use model.generate(..., custom_generate=method) or revisit.generate(model, ..., "
        "method=method)."
    )


def _refuse(mode: Any, generation_config: Any, caller: dict[str, Any]) -> None:
    """One clear sentence for what cannot be done exactly."""
    if mode not in SUPPORTED_MODES:
        name = str(getattr(mode, "value", mode)).replace("_", " ")
        raise RevisitError(
            f"Decoding methods work with greedy search, sampling and beams, not with {name} (assisted decoding included, whose "
            "candidates come from another distribution): leave out the options that ask for it."
        )
    if getattr(generation_config, "prefill_chunk_size", None) is not None:
        raise RevisitError(
            "prefill_chunk_size is not supported: with it, transformers loses the image between chunks; leave it out."
        )
    if mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE) and caller.get("streamer") is not None:
        raise RevisitError("Beam search cannot be streamed: leave out the streamer, or set num_beams=1.")
