"""How long decoding takes with a method and without: the protocol, random models of real shapes, stated profiles.

A call is timed from outside: the moment every token is known gives the time to the first token and the interval of
each further one; on a GPU by events in its queue, for which nothing waits before the call has ended. The method's own
time, spent inside its logits processor, is measured beside it: it is what the method adds, and noise of the machine does
not hide it. Methods take turns within every repeat, so that a slow minute of the machine is everybody's; the processor
time of a step is noted too, which neighbors on the machine inflate less.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import StoppingCriteria

import revisit
from revisit.decoding.method import Method
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError, unknown

if TYPE_CHECKING:
    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run
    from revisit.models.types import Processor

Moment = Any  # seconds of the host's clock, or an event in the queue of a GPU

# -- random models of real shapes ---------------------------------------------------------------------------------

_QWEN_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "fullatt_block_indexes": [0]}
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def _qwen(layers: int, width: int, inner: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    """A Qwen2.5-VL text model; the vision tower is a stub, so that all time is the text model's."""
    return {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [width // heads // 2 - 2 * (3 * width // heads // 16)]
                + 2 * [3 * width // heads // 16],
            },
        },
        "vision_config": {**_QWEN_TOWER, "out_hidden_size": width},
        "tie_word_embeddings": tied,
        **(_QWEN_IDS if vocabulary > 151655 else {n: i + 4 for i, n in enumerate(_QWEN_IDS)}),
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-toy": _qwen(4, 64, 128, 4, 2, 5000, True),
    "qwen2.5-vl-0.5b": _qwen(24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-vl-0.5b-untied": _qwen(24, 896, 4864, 14, 2, 151936, False),
    "qwen2.5-vl-3b": _qwen(36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-vl-7b": _qwen(28, 3584, 18944, 28, 4, 152064, False),
}


def random_model(shape: str | Path, *, dtype: torch.dtype = torch.float32, device: Any = "cpu", seed: int = 0) -> Any:
    """A model with random weights from a built-in shape's name or a config.json (or the folder that holds one)."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    path = Path(shape)
    if str(shape) in SHAPES:
        config = AutoConfig.for_model(**SHAPES[str(shape)])
    elif path.exists():
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = str(error).split("\n")[0].rstrip(".")
            raise RevisitError(f"{shape} is no configuration of a model ({reason}).") from None
    else:
        raise unknown("shape (or path of a config.json)", str(shape), SHAPES)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def random_inputs(
    model: Any, vision_tokens: int, text_tokens: int = 32, batch: int = 1, seed: int = 0
) -> dict[str, Any]:
    """A prompt with one random image of `vision_tokens` tokens in each row.

    Qwen-VL shapes get pixels; other families a prompt of embeddings, which is all that the text model ever sees.
    """
    generator = torch.Generator().manual_seed(seed)
    config, text = model.config, model.config.get_text_config()
    before, after = 4, text_tokens - 4
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        vision = config.vision_config
        merge = vision.spatial_merge_size
        high = max(h for h in range(1, math.isqrt(vision_tokens) + 1) if vision_tokens % h == 0)
        grid = torch.tensor([[1, high * merge, vision_tokens // high * merge]]).repeat(batch, 1)
        channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(batch * vision_tokens * merge**2, channels, generator=generator)
        words = torch.randint(20, text.vocab_size // 2, (batch, before + after), generator=generator)
        image = torch.full((batch, vision_tokens), config.image_token_id)
        ids = torch.cat([words[:, :before], image, words[:, before:]], dim=1).to(model.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels.to(model.device, model.dtype),
            "image_grid_thw": grid.to(model.device),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    length = before + vision_tokens + after
    embeddings = torch.randn(batch, length, text.hidden_size, generator=generator).to(model.device, model.dtype)
    mask = torch.zeros(batch, length, dtype=torch.bool, device=model.device)
    mask[:, before : before + vision_tokens] = True
    return {"inputs_embeds": embeddings, "attention_mask": torch.ones_like(mask).long(), "vision_mask": mask}


# -- what a random model says -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """Next-token logits with plausible sets of stated sizes, in place of a random model's, which are flat.

    The set sizes, for alpha = 1e-5, are log-normal: `median`, with `spread` the standard deviation of their logarithm
    (0 makes every step alike), at most `largest`. Logits are a word-frequency prior, −`zipf`·ln(rank + 2.7), plus Gumbel
    noise of each step's own, scaled until the step has its size; so frequent tokens come back and rare ones are new.
    With the default exponent 83 % of the 64 best and 85 % of the 512 best tokens of a step were among the best of an
    earlier one, over 200 steps; of SmolLM2-135M-Instruct's, describing a scene, 77 % and 88 % were.
    """

    median: int = 64
    spread: float = 1.3
    largest: int = 8000
    zipf: float = 1.5
    steps: int = 200
    seed: int = 0
    made: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    ALPHA: ClassVar[float] = 1e-5

    def sizes(self) -> list[int]:
        """The size of the plausible set at each step."""
        quantiles = (torch.arange(self.steps, dtype=torch.float64) + 0.5) / self.steps
        normal = torch.special.ndtri(quantiles)[
            torch.randperm(self.steps, generator=torch.Generator().manual_seed(self.seed))
        ]
        return [max(1, min(self.largest, round(self.median * math.exp(self.spread * z)))) for z in normal.tolist()]

    def logits(self, vocabulary: int) -> Tensor:
        """(steps, V), made once."""
        if vocabulary not in self.made:
            generator = torch.Generator().manual_seed(self.seed)
            rank = torch.randperm(vocabulary, generator=generator)
            prior = -self.zipf * torch.log(rank + 2.7)
            rows = []
            for size in self.sizes():
                noise = -torch.log(-torch.log(torch.rand(vocabulary, generator=generator).clamp(1e-9, 1 - 1e-7)))
                words = prior + noise
                size = min(size, vocabulary - 1)
                top = words.topk(size + 1).values
                edge = 0.5 * (top[-1] + top[-2])
                rows.append((words - top[0]) * (-math.log(self.ALPHA) / (top[0] - edge)))
            self.made[vocabulary] = torch.stack(rows)
        return self.made[vocabulary]

    def at(self, step: int, like: Tensor) -> Tensor:
        """Logits of one step in the shape of the model's (B, V); rows of a batch are at different steps."""
        table = self.logits(like.shape[-1])
        if table.device != like.device:
            table = self.made[like.shape[-1]] = table.to(like.device)
        return torch.stack([table[(step + 37 * row) % self.steps] for row in range(len(like))])

    def describe(self) -> str:
        """The profile in words, with the quantiles it really has."""
        sizes = sorted(self.sizes())
        cuts = "/".join(str(sizes[min(len(sizes) - 1, int(q * len(sizes)))]) for q in (0.1, 0.5, 0.9, 1.0))
        return (
            f"plausible-set sizes at alpha {self.ALPHA:g}: 10 % / median / 90 % / largest = {cuts} over {self.steps} steps; "
            f"tokens drawn by word frequency (Zipf exponent {self.zipf:g})"
        )


# -- timing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed(Method):
    """A method, timed from inside, whose model says what the profile says (or what it likes)."""

    inner: Method
    profile: Profile | None = None
    spans: list[tuple[Moment, Moment]] = field(default_factory=list, compare=False)  # inside the method, step by step
    busy: list[float] = field(default_factory=list, compare=False)  # the same in processor time of all threads

    name = "timed"

    def settings(self) -> dict[str, Any]:
        return self.inner.settings()

    @property
    def needs_processor(self) -> bool:
        return self.inner.needs_processor

    def bind(self, processor: Processor) -> Timed:
        return replace(self, inner=self.inner.bind(processor))

    def begin(self, run: Run) -> Refine:
        refine = self.inner.begin(run)
        step = 0

        def timed(input_ids: Tensor, logits: Tensor) -> Tensor:
            nonlocal step
            if self.profile is not None:
                logits = self.profile.at(step, logits)
            step += 1
            started, busy = now(logits.device), time.process_time()
            scores = refine(input_ids, logits)
            self.spans.append((started, now(logits.device)))
            self.busy.append(time.process_time() - busy)
            return scores

        return timed


def wait(device: torch.device) -> None:
    """Let the device finish what was queued, where it has a queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> Moment:
    """This moment of the host, or, for a GPU, the moment when its queue gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Moment, end: Moment) -> float:
    """Between two moments that have passed."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3


class _Clock(StoppingCriteria):
    """Never stops anything; notes when each token was known."""

    def __init__(self) -> None:
        self.times: list[Moment] = []
        self.busy: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.times.append(now(input_ids.device))
        self.busy.append(time.process_time())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class Timing:
    """What one method took, over all repeats."""

    label: str
    first: list[float] = field(default_factory=list)  # seconds to the first token, one per repeat
    intervals: list[list[float]] = field(default_factory=list)  # seconds between tokens, one list per repeat
    own: list[float] = field(default_factory=list)  # seconds inside the method at each further step
    own_first: list[float] = field(default_factory=list)  # and at the first
    busy: list[float] = field(default_factory=list)  # processor seconds of each further step, all threads
    own_busy: list[float] = field(default_factory=list)  # and of the method's part of it
    rows: int = 1  # sequences that were decoded together
    peak: int = 0  # most bytes that a call needed beyond what was there before it
    counters: dict[str, Any] = field(default_factory=dict)

    @property
    def per_token(self) -> tuple[float, float]:
        """Mean and standard deviation over the repeats of a run's seconds per further token."""
        means = [statistics.fmean(run) for run in self.intervals]
        return statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else 0.0

    @property
    def quick(self) -> float:
        """Lower quartile of all intervals: the step time of an undisturbed machine."""
        every = sorted(interval for run in self.intervals for interval in run)
        return every[len(every) // 4]


def time_call(
    model: Any, inputs: dict[str, Any], method: Method, timing: Timing, profile: Profile | None, **kw: Any
) -> Any:
    """Run one call, add what it took to `timing`, and return what it generated."""
    clock, timed, trace = _Clock(), Timed(method, profile), Trace()
    memory = Memory(model.device)
    wait(model.device)
    started = now(model.device)
    out = revisit.generate(model, **inputs, method=timed, trace=trace, stopping_criteria=[clock], **kw)
    wait(model.device)
    timing.rows = len(out)
    timing.peak = max(timing.peak, memory.peak())
    timing.first.append(seconds(started, clock.times[0]))
    timing.intervals.append([seconds(a, b) for a, b in pairwise(clock.times)])
    own = [seconds(*span) for span in timed.spans]
    timing.own_first.append(own[0])
    timing.own.extend(own[1:])
    timing.busy.extend(b - a for a, b in pairwise(clock.busy))
    timing.own_busy.extend(timed.busy[1:])
    timing.counters = trace.summary()
    return out


def measure(
    model: Any,
    inputs: dict[str, Any],
    methods: dict[str, tuple[Method, Profile | None]],
    *,
    new_tokens: int,
    repeats: int = 3,
    warmups: int = 1,
    **generate_kwargs: Any,
) -> list[Timing]:
    """Time every method, taking turns; the first one is what the others are compared with."""
    if new_tokens < 3:
        raise RevisitError("Timing needs at least 3 new tokens.")
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    timings = {label: Timing(label) for label in methods}
    for repeat in range(-warmups, repeats):
        for label, (method, profile) in methods.items():
            warm = repeat < 0
            timing = Timing(label) if warm else timings[label]
            length = {"min_new_tokens": 4, "max_new_tokens": 4} if warm else {}
            time_call(model, inputs, method, timing, profile, **{**options, **length, **generate_kwargs})
    return list(timings.values())


class Memory:
    """The most memory that was needed since this was made, beyond what was in use then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
            return
        _trim()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the process's peak so far
        self.start = _status("VmRSS")

    def peak(self) -> int:
        """Bytes; on the CPU from the kernel's count of resident pages, 0 where it keeps none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return max(0, _status("VmHWM") - self.start)


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _trim() -> None:
    """Give freed memory back to the system, so that it is not taken for memory in use."""
    import ctypes
    import gc

    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def table(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """One row per method, in milliseconds and MiB, with ratios to the first."""
    base = timings[0]
    base_first = statistics.median(base.first)
    rows = []
    for timing in timings:
        mean, deviation = timing.per_token
        own = statistics.fmean(timing.own)
        # what greedy does, in the same minutes
        rest = statistics.fmean(t for run in timing.intervals for t in run) - own
        rows.append(
            {
                "method": timing.label,
                "first_token_ms": 1e3 * statistics.median(timing.first),
                "first_token_ratio": statistics.median(timing.first) / base_first,
                "ms_per_token": 1e3 * mean,
                "ms_per_token_std": 1e3 * deviation,
                "tokens_per_second": timing.rows / mean,
                "ratio": timing.quick / base.quick,
                "own_first_ms": 1e3 * statistics.median(timing.own_first),
                "own_ms_per_step": 1e3 * own,
                "own_ratio": 1 + own / rest,
                "own_cpu_ratio": 1 + statistics.fmean(timing.own_busy) / statistics.fmean(base.busy),
                "extra_memory_mib": (timing.peak - base.peak) / 2**20,
                "median_set_size": timing.counters.get("median_set_size"),
                "largest_set_size": timing.counters.get("largest_set_size"),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The table as text."""
    head = (
        "method",
        "first token",
        "×",
        "ms/token",
        "×",
        "tokens/s",
        "own ms/step",
        "1 + own/rest",
        "same in CPU time",
        "extra MiB",
        "set median/max",
    )
    lines = [
        (
            row["method"],
            f"{row['first_token_ms']:.0f} ms",
            f"{row['first_token_ratio']:.3f}",
            f"{row['ms_per_token']:.1f} ± {row['ms_per_token_std']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['own_ms_per_step']:.2f}",
            f"{row['own_ratio']:.4f}",
            f"{row['own_cpu_ratio']:.4f}",
            f"{row['extra_memory_mib']:.0f}",
            "–" if row["median_set_size"] is None else f"{row['median_set_size']:.0f} / {row['largest_set_size']}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *lines)]
    return "\n".join(line.rstrip() for line in made)
