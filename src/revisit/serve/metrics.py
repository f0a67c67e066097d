"""Counters in the text format that Prometheus reads; small enough to need no library."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Histogram:
    """How often values fell at or below each bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        lines, running = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {running}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {running}"]


class Metrics:
    """Everything `/metrics` shows; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._help: dict[str, str] = {
            "revisit_requests_total": "Chat requests by HTTP status.",
            "revisit_prompt_tokens_total": "Prompt tokens, with vision tokens.",
            "revisit_generated_tokens_total": "Generated tokens.",
            "revisit_steps_total": "Decoding steps by method.",
            "revisit_applied_steps_total": "Steps on which the method acted, by method.",
            "revisit_changed_steps_total": "Steps on which its favourite differed from the model's, by method.",
        }
        self.seconds = Histogram(SECONDS)
        self.first_token = Histogram(SECONDS)
        self.batch = Histogram(SIZES)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "process_resident_memory_bytes": ("Resident memory.", resident_bytes)
        }

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + value

    def observe(self, histogram: Histogram, value: float) -> None:
        with self._lock:
            histogram.add(value)

    def text(self) -> str:
        """The page."""
        lines: list[str] = []
        with self._lock:
            for name, about in self._help.items():
                lines += [f"# HELP {name} {about}", f"# TYPE {name} counter"]
                for (counter, labels), value in sorted(self._counters.items()):
                    if counter == name:
                        inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
                        lines.append(f"{name}{{{inside}}} {value:.15g}" if inside else f"{name} {value:.15g}")
            for name, about, histogram in (
                ("revisit_request_seconds", "From arrival to the end of the answer.", self.seconds),
                ("revisit_first_token_seconds", "From arrival to the first token.", self.first_token),
                ("revisit_batch_size", "Requests decoded together.", self.batch),
            ):
                lines += [f"# HELP {name} {about}", f"# TYPE {name} histogram", *histogram.lines(name)]
        for name, (about, read) in self.gauges.items():
            lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {read():.15g}"]
        return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def resident_bytes() -> float:
    """Memory of this process, where the system says so; 0 elsewhere."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return 0.0
