"""One call of generate() as a method sees it: the prompt, the model's parts, what can be tapped, and the count of its steps.

Counters stay on the device while the call runs and are read when it ends, so that counting never makes the host wait. A
record of every step (`Trace(record=True)`) is read step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.decoding.trace import RowTrace, StepRecord, Trace
from revisit.errors import RevisitError
from revisit.models.families import IMAGE_INPUTS
from revisit.models.parts import ModelParts, describe
from revisit.models.processors import processor_of
from revisit.models.types import Processor, Tokenizer
from revisit.taps.attention import AttentionHook, Call, watching
from revisit.taps.early_exits import EarlyExits
from revisit.taps.states import Capture, VisionStates, no_image, vision_mask

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig

    from revisit.decoding.method import Method
    from revisit.step.reference import Refinement


FLUSH_STEPS = 1024  # steps whose counters are kept on the device before they are read


class EndedRows:
    """Which rows the loop has ended, kept on the device."""

    def __init__(self, prompt_length: int, beams: bool) -> None:
        self.prompt_length, self.beams = prompt_length, beams
        self._ended: Tensor | None = None  # (rows,)

    def add(self, rows: Tensor) -> None:
        """The loop ended these rows, and goes on for the others. Beam search replaces ended beams, so none end there."""
        if not self.beams:
            self._ended = rows if self._ended is None else self._ended | rows

    def forget(self) -> None:
        """No row has ended: the loop went back."""
        self._ended = None

    def before(self, input_ids: Tensor) -> Tensor | None:
        """Rows that have ended before this step (rows,); None where no row can have."""
        return None if input_ids.shape[1] == self.prompt_length else self._ended


class Recorder:
    """Fills a trace. A chain has one for the whole and one for each of its methods."""

    def __init__(self, trace: Trace, method: Method, rows: int, ended: EndedRows, stack: ExitStack) -> None:
        self.trace, self.ended, self.stack = trace, ended, stack
        trace.method = {"name": method.name, **method.settings()}
        trace.rows = [RowTrace() for _ in range(rows)]
        trace.layers, trace.links = (), []
        self.noted = False  # whether the step at hand has been counted
        self._unread: list[tuple[Tensor | None, ...]] = []  # of each step: sizes, applied, changed, seen, ended
        stack.callback(self.flush)

    @property
    def records(self) -> bool:
        """Whether every step is recorded, not only counted."""
        return self.trace.record

    def link(self, method: Method) -> Recorder:
        """A recorder for one method of a chain; it counts and does not record."""
        trace = Trace()
        self.trace.links.append(trace)
        return Recorder(trace, method, len(self.trace.rows), self.ended, self.stack)

    def active(self, input_ids: Tensor) -> list[int]:
        """Rows that have not ended before this step, read by the host."""
        ended = self.ended.before(input_ids)
        over = [False] * len(input_ids) if ended is None else ended.tolist()
        return [row for row, has_ended in enumerate(over) if not has_ended]

    # -- one step ---------------------------------------------------------------------------------------------------

    def note_later(
        self,
        input_ids: Tensor,
        sizes: Tensor | None = None,
        applied: Tensor | None = None,
        changed: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> None:
        """Count one step of all rows from (rows,) tensors, without reading them now and without work for the device.

        No set is counted where the size is 0 or the row has not `seen` an image.
        """
        self.noted = True
        self._unread.append((sizes, applied, changed, seen, self.ended.before(input_ids)))
        if len(self._unread) == FLUSH_STEPS:
            self.flush()

    def note(
        self,
        row: int,
        *,
        applied: bool = False,
        changed: bool = False,
        plausible_tokens: int | None = None,
        record: StepRecord | None = None,
    ) -> None:
        """Count one step of one row."""
        self.noted = True
        counters = self.trace.rows[row]
        counters.step_count += 1
        counters.applied += applied
        counters.changed += changed
        if plausible_tokens is not None:
            counters.plausible_tokens.append(plausible_tokens)
        if record is not None:
            counters.records.append(record)

    def note_scores(
        self,
        input_ids: Tensor,
        base: Tensor,
        scores: Tensor,
        other: Tensor | None = None,
        acted: Tensor | None = None,
        layer: Tensor | None = None,
    ) -> None:
        """Count, and on request record, a step that turned the logits `base` into `scores`, all rows at once.

        The set of a row is where its scores are finite. `other` are the logits that were contrasted with (all (rows, V)),
        `acted` (rows,) says where the method had anything to do, `layer` (rows,) which of the trace's layers each row used.
        """
        sizes = scores.isfinite().sum(-1)
        applied = sizes > 1 if acted is None else acted.to(sizes.device) & (sizes > 1)
        changed = (scores.argmax(-1) != base.argmax(-1)) & applied
        if not self.records:
            self.note_later(input_ids, sizes, applied, changed)
            return
        counts: list[list[int]] = torch.stack([sizes, applied, changed]).tolist()
        chosen = None if layer is None else layer.tolist()
        for row in self.active(input_ids):
            size, did, moved = counts[0][row], bool(counts[1][row]), bool(counts[2][row])
            contrast = other[row] if other is not None and did else None
            record = self._record_scores(row, base[row], scores[row], contrast, size)
            record.layer = self.trace.layers[chosen[row]] if chosen is not None and did else None
            self.note(row, applied=did, changed=moved, plausible_tokens=size, record=record)

    def note_plain(self, input_ids: Tensor, logits: Tensor) -> None:
        """Count, and on request record, a step that left the logits (rows, V) as they are."""
        if not self.records:
            self.note_later(input_ids)
            return
        for row in self.active(input_ids):
            size = int(logits[row].isfinite().sum())
            self.note(row, record=self._record_scores(row, logits[row], logits[row], None, size))

    def note_refinement(self, row: int, result: Refinement | None, states: VisionStates) -> None:
        """Count, and on request record, a step that fused two distributions over a plausible set; None: left as it is."""
        if result is None:
            self.note(row)
            return
        record = self._record(row, result, states) if self.records else None
        self.note(row, applied=result.applied, changed=result.changed, plausible_tokens=result.size, record=record)

    def step_back(self, length: int) -> None:
        """The loop went back to `length` tokens a row: steps stay counted, records of later tokens are dropped."""
        self.ended.forget()
        for row in self.trace.rows:
            del row.records[length - self.ended.prompt_length + 1 :]

    # -- the end ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Read the counters that are still on the device."""
        columns = [read_together(column) for column in zip(*self._unread, strict=True)]
        self._unread = []
        for sizes, applied, changed, seen, ended in zip(*columns, strict=True):
            for row in range(len(self.trace.rows)):
                if ended is None or not ended[row]:
                    size = sizes[row] if sizes is not None and (seen is None or seen[row]) else 0
                    did, moved = (values is not None and bool(values[row]) for values in (applied, changed))
                    self.note(row, applied=did, changed=moved, plausible_tokens=size or None)

    def finish(self, sequences: Tensor, tokenizer: Tokenizer | None = None) -> None:
        """Fill in which token was chosen at each recorded step (not for beams: there rows change places)."""
        if not self.records or self.ended.beams:
            return
        for row, tokens in zip(self.trace.rows, sequences[:, self.ended.prompt_length :].tolist(), strict=True):
            for record, token in zip(row.records, tokens, strict=False):
                record.token = token
        if tokenizer is not None:
            self.trace.add_text(tokenizer)

    # -- records ----------------------------------------------------------------------------------------------------

    def _record_scores(self, row: int, base: Tensor, scores: Tensor, other: Tensor | None, size: int) -> StepRecord:
        """Candidates of one step; every column is a distribution over the row's set."""
        outside = ~scores.isfinite()
        before, after = (x.masked_fill(outside, -torch.inf).softmax(-1) for x in (base.float(), scores.float()))
        order = with_favorite(after.topk(min(size, self.trace.candidates)).indices, before.argmax())
        between = None if other is None else other.float().masked_fill(outside, -torch.inf).softmax(-1)[order].tolist()
        return StepRecord(
            step=self.trace.rows[row].step_count + 1,
            token=None,
            ids=order.tolist(),
            base=before[order].tolist(),
            vision=between,
            final=after[order].tolist(),
            plausible_tokens=size,
        )

    def _record(self, row: int, result: Refinement, states: VisionStates) -> StepRecord:
        final = result.final.softmax(-1)
        best = final.argsort(descending=True, stable=True)[: self.trace.candidates]
        order = with_favorite(best, result.base.argmax())
        record = StepRecord(
            step=self.trace.rows[row].step_count + 1,
            token=None,
            ids=result.ids[order].tolist(),
            base=result.base.exp()[order].tolist(),
            vision=None,
            final=final[order].tolist(),
            plausible_tokens=len(result.ids),
        )
        if result.applied and result.divergences is not None:
            record.vision = result.vision.exp()[order].tolist()
            record.layer, record.vision_token = states.place(result.state)
            record.divergence = float(result.divergences[result.state])
            record.divergences = result.divergences.float().cpu().view(len(states.layers), states.tokens)
            record.weight = result.weight
        return record


def with_favorite(order: Tensor, favorite: Tensor) -> Tensor:
    """The best candidates, the last one replaced by the model's own favorite if that is not among them."""
    return order if bool((order == favorite).any()) else torch.cat([order[:-1], favorite[None]])


def read_together(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The values of many small tensors of one shape, read from their device in one go; None stays None."""
    known = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack([tensor.to(known[0].device) for tensor in known]).tolist() if known else ())
    return [None if tensor is None else next(values) for tensor in tensors]


CACHE = "past_key_values"
PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass
class Run:
    """One call of generate, and its method, with what that leaves to the model."""

    method: Method
    model: Any
    input_ids: Tensor  # (rows, T) the prompt, already repeated for beams and return sequences
    model_kwargs: dict[str, Any]  # what the loop passes to the model
    inputs: dict[str, Any]  # what the caller passed to generate, before any preparation (pixels, grid sizes, ...)
    generation_config: GenerationConfig
    into: InitVar[Trace]  # emptied, and filled with what the method does; names the method as it was asked for
    stack: ExitStack  # closed when the call ends, however it ends
    user_mask: Tensor | None = None  # vision positions given by the caller
    given_processor: Processor | None = None  # the processor that the caller passed
    raw: Tensor | None = None  # (rows, V) the model's own logits at this step
    contrasting: bool = False  # whether a forward runs that has no clean rows
    clean_shift: int = 0  # columns of padding that the KV cache has before the clean prompt
    parts: ModelParts = field(init=False)

    def __post_init__(self, into: Trace) -> None:
        config = self.generation_config
        self.copies: int = max(config.num_beams, config.num_return_sequences)  # consecutive rows that are one item's
        self.loop_model: Any = self.model  # what the loop runs: the model or a stand-in for it
        self.reorder_hooks: list[Callable[[Tensor], None]] = []
        self._exits = False  # whether some method looks at early layers
        self._unreached: set[str] = set()  # methods whose attention hooks have not been called yet
        self._length = 0  # tokens of each row that `forward` has run
        self.method = self.method.for_model(self.model)
        ended = EndedRows(self.input_ids.shape[1], self.beams)
        self.recorder = Recorder(into, self.method, len(self.input_ids), ended, self.stack)

    @property
    def processor(self) -> Processor:
        """The model's processor, as the caller passed it or as found; raises RevisitError if there is none."""
        return self.given_processor or processor_of(self.model, type(self.method).__name__)

    @property
    def trace(self) -> Trace:
        """The trace of the method that acts now."""
        return self.recorder.trace

    @property
    def beams(self) -> bool:
        """Whether rows are beams, which are compared with each other and change places."""
        return bool(self.generation_config.num_beams > 1)

    def item(self, row: int) -> int:
        """Which item of the batch a row belongs to; beams never cross items."""
        return row // self.copies

    # -- the prompt ---------------------------------------------------------------------------------------------

    def find_vision_tokens(self, *, required: bool = True) -> Tensor:
        """Find the model's parts and the prompt's vision positions (rows, T).

        Refuses prompts without any image, unless the method does not need one (`required=False`).
        """
        self.parts = ModelParts.of(self.model)
        mask = self._vision_mask(required)
        counts = mask.sum(-1).tolist()  # vision tokens of each row
        if not any(counts):
            if not required:
                return mask
            raise no_image(self.model)
        cached = self.model_kwargs.get("past_key_values")
        has_pixels = any(self.inputs.get(name) is not None for name in (*IMAGE_INPUTS, "inputs_embeds"))
        if not has_pixels and (cached is None or cached.get_seq_length() == 0):
            raise RevisitError(
                "The prompt has placeholders for an image but no pixels: pass everything the processor returned "
                "(model.generate(**inputs))."
            )
        for row, count in zip(self.trace.rows, counts, strict=True):
            row.vision_tokens = count
        return mask

    def _vision_mask(self, required: bool) -> Tensor:
        embeds = self.model_kwargs.get("inputs_embeds")
        only_embeds = embeds is not None and self.input_ids.shape[1] == 0
        if self.user_mask is not None:
            if not isinstance(self.user_mask, Tensor):
                raise RevisitError(
                    f"vision_mask must be a tensor (batch, length), True at vision positions, not {type(self.user_mask).__name__}."
                )
            mask = self.user_mask.to(self.input_ids.device).bool()
            length = embeds.shape[1] if embeds is not None and only_embeds else self.input_ids.shape[1]
            wanted = (self.input_ids.shape[0] // self.copies, length)
            if tuple(mask.shape) != wanted:
                raise RevisitError(
                    f"vision_mask must have the shape of the prompts, {wanted} (batch, length), not {tuple(mask.shape)}."
                )
            return mask.repeat_interleave(self.copies, dim=0)
        if only_embeds:
            if not required:
                return self.input_ids.bool()
            raise RevisitError(
                "The prompt was passed as inputs_embeds, so the positions of the vision tokens are unknown: pass vision_mask, a "
                "(batch, length) mask that is True at their positions."
            )
        return vision_mask(self.input_ids, self.parts.vision_ids)

    # -- taps ---------------------------------------------------------------------------------------------------

    def capture(self, mask: Tensor, layers: tuple[int, ...], *, final_norm: bool = False) -> Capture:
        """Start keeping the states of the vision tokens at these layers; complete after the prefill."""
        self.trace.layers = layers
        cache = self.model_kwargs.get("past_key_values")
        return Capture(
            self.parts,
            mask,
            layers,
            self.copies,
            self.stack,
            final_norm=final_norm,
            cache=cache,
            ignore=lambda: self.contrasting,
        )

    def watch_attention(self, hook: AttentionHook, name: str, *, prompt_only: bool = False) -> None:
        """Let `hook` read or change every attention call of the decoder until the call ends.

        Refuses models whose attention it cannot reach, and calls that outgrow the sliding window of some layer, where the image's
        place in attention is not known; with `prompt_only`, the hook needs the prompt's attention alone.
        """
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        if not prompt_only and slides and window and self.generation_config.max_length > window:
            raise RevisitError(
                f"{name} works on attention, and some layers of {describe(self.model)} see only the last {window} tokens, fewer "
                f"than the {self.generation_config.max_length} that this call may reach: ask for fewer new tokens, or use another method."
            )

        def reached(call: Call) -> Callable[[Tensor], Tensor] | None:
            self._unreached.discard(name)
            return hook(call)

        self._unreached.add(name)
        self.stack.enter_context(watching(self.parts, reached, name))

    def check_attention(self) -> None:
        """Refuses a model that has run without its attention passing through the hooks of `watch_attention`."""
        if self._unreached:
            raise RevisitError(
                f"{min(self._unreached)}: {describe(self.model)} computes its attention without transformers' attention interface, so it "
                "cannot be read or changed: use another method."
            )

    def early_exits(self, layers: tuple[int, ...], *, final_norm: bool = False) -> EarlyExits:
        """Start projecting the last position's states at these layers, at every step."""
        self.trace.layers = layers
        if self._exits:
            raise RevisitError(
                "Only one method of a chain can read early layers (DoLa, DeCo, VISTA): remove the others."
            )
        self._exits = True
        return EarlyExits(
            self.parts,
            layers,
            self.input_ids.shape[0],
            self.stack,
            final_norm=final_norm,
            ignore=lambda: self.contrasting,
        )

    def finish_capture(self, capture: Capture, logits: Tensor) -> list[VisionStates]:
        """The captured states of every item, ready to be projected; call at the first step, with its raw logits."""
        capture.release()
        if capture.last is None:
            raise RevisitError(
                f"The prefill of {describe(self.model)} did not pass through its decoder module, so no vision states were captured; this "
                "way of running the model is not supported."
            )
        raw = logits if self.raw is None else self.raw  # another method may have changed the logits before
        self.parts.head.calibrate(capture.last[0], raw[0], describe(self.model))
        return capture.items

    # -- steps --------------------------------------------------------------------------------------------------

    def decode_by(
        self,
        input_ids: Tensor,
        logits: Tensor,
        scores: Tensor,
        other: Tensor | None = None,
        acted: Tensor | None = None,
        layer: Tensor | None = None,
    ) -> Tensor:
        """The scores for a method's step to return, counted and recorded; see `Recorder.note_scores` for the arguments."""
        if self.beams and scores is not logits:  # beams are compared with each other; the logits are normalized already
            scores = scores.log_softmax(-1)
        self.recorder.note_scores(input_ids, logits, scores, other, acted, layer)
        return scores

    # -- for methods with a decoding loop of their own, and for beams ------------------------------------------------

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run the model on what the KV cache does not hold yet.

        Args:
            input_ids: (rows, length) the prompt and everything chosen so far, at least one token longer than at the last
                call, unless `crop` has shortened what is kept.

        Returns:
            The model's own logits for the next token.  (rows, V), float32
        """
        model, kwargs = self.loop_model, self.model_kwargs
        if not self._length:
            if not input_ids.shape[1]:
                raise RevisitError(
                    f"{type(self.method).__name__} has its own decoding loop, which needs the prompt as input_ids, not as inputs_embeds."
                )
            outputs = model._prefill(input_ids, self.generation_config, kwargs)
        else:
            new = input_ids.shape[1] - self._length
            if new < 1:
                raise RevisitError("run.forward needs at least one new token: append one, or crop first.")
            kwargs = model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=new)
            ahead = new if kwargs.get("use_cache", True) else None
            outputs = model(
                **model.prepare_inputs_for_generation(input_ids, next_sequence_length=ahead, **kwargs), return_dict=True
            )
        self.check_attention()
        self.model_kwargs, self._length = kwargs, input_ids.shape[1]
        self.raw = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        return self.raw

    def crop(self, length: int) -> None:
        """Go back: forget every token after the first `length` of each row, also in the KV cache and in the trace."""
        drop = self._length - length
        if drop < 0 or length < self.input_ids.shape[1]:
            raise RevisitError(
                f"run.crop({length}): the length must be between {self.input_ids.shape[1]} (the "
                f"prompt) and {self._length} (all tokens run so far)."
            )
        cache: Cache | None = self.model_kwargs.get(CACHE)
        try:
            if isinstance(self.loop_model, StandIn):
                self.loop_model.crop(cache, drop)
            elif cache is not None:
                cache.crop(-drop)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            raise RevisitError(
                f"{type(self.method).__name__} goes back, which the KV cache of {describe(self.model)} does "
                f"not support ({error}): use the default cache, or another method."
            ) from error
        for name in PER_TOKEN:
            if isinstance(value := self.model_kwargs.get(name), Tensor):
                self.model_kwargs[name] = value[..., : value.shape[-1] - drop]
        self._length = length
        self.recorder.step_back(length)

    def reorder(self, rows: Tensor) -> None:
        """Let each row go on from another one of its item: row i from row rows[i].  (rows,)"""
        self._stand_in()
        if (cache := self.model_kwargs.get(CACHE)) is not None:
            self.model_kwargs[CACHE] = self.loop_model._reorder_cache(cache, rows)

    def on_reorder(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with (rows,) whenever beams change places: row i goes on from what row rows[i] was."""
        if self.beams and not self.generation_config.use_cache:
            raise RevisitError(
                f"{type(self.method).__name__} follows beams, which transformers reorders with their KV cache: leave out use_cache=False."
            )
        self._stand_in()
        self.reorder_hooks.append(hook)

    def _stand_in(self) -> None:
        if not isinstance(self.loop_model, StandIn):
            self.loop_model = StandIn(self)


class StandIn:
    """Takes the model's place in the decoding loop, to hear of beams that change places."""

    def __init__(self, run: Run) -> None:
        self._run, self._model = run, run.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def _valid_auto_compile_criteria(self, *_args: object, **_kwargs: object) -> bool:
        return False  # the loop must call us, not a compiled forward of the model

    def _reorder_cache(self, cache: Cache, beam_idx: Tensor) -> Cache:
        self.reorder(cache, beam_idx)
        for hook in self._run.reorder_hooks:
            hook(beam_idx)
        return cache

    def reorder(self, cache: Cache, rows: Tensor) -> None:
        cache.reorder_cache(rows)  # type: ignore[arg-type]

    def crop(self, cache: Cache | None, count: int) -> None:
        """Drop the last `count` tokens of every row."""
        if cache is not None:
            cache.crop(-count)
