"""The trace of a decode: counters always, and a record of every step on request."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from revisit.decoding.method_id import method_text
from revisit.errors import RevisitError, need
from revisit.io.files import write_text
from revisit.models.tokens import token_text, token_texts

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from revisit.models.types import Tokenizer


@dataclass
class StepRecord:
    """One step of one row: its candidates, the likeliest (after the method) first, and how the method chose."""

    step: int  # from 1
    token: int | None  # the chosen token; None with beams
    ids: list[int]  # the candidates: the plausible set, or the best of it
    base: list[float]  # probability before the method
    vision: list[float] | None  # probability in the selected vision token, or in the contrasted pass, if there was one
    final: list[float]  # probability after the method
    plausible_tokens: int  # size of the plausible set
    layer: int | None = None  # index into the decoder's hidden states: 0 is the projector's output
    vision_token: int | None = None  # the selected vision token of the row, from 0
    divergence: float | None = None
    divergences: Tensor | None = field(default=None, repr=False)  # (layers, vision tokens), float32 on the CPU
    weight: float | None = None  # of the vision side in the fusion
    thought: bool = False  # whether the step belongs to a thought, in a model that thinks; filled in by `ask`
    text: str | None = None  # text of `token`; None if no processor was found
    texts: list[str] | None = None  # texts of `ids`
    patch_row: int | None = None  # of the selected vision token in its image, from 1; filled in by `ask`
    patch_col: int | None = None
    time: float | None = None  # of the frame in seconds, in a video

    @property
    def changed(self) -> bool:
        """Whether the method's best token differs from the model's own."""
        return self.instead_of is not None

    @property
    def instead_of(self) -> int | None:
        """The model's own best token, if the method's differs."""
        best = self.ids[max(range(len(self.base)), key=self.base.__getitem__)]
        return best if best != self.ids[0] else None

    @property
    def instead_of_text(self) -> str | None:
        """The text of the model's own best token, if the method's differs and texts were recorded."""
        return None if self.instead_of is None or self.texts is None else self.texts[self.ids.index(self.instead_of)]

    @property
    def shift(self) -> float:
        """Share of probability that the method moved, 0 to 1 (total variation).

        Everything outside the listed candidates counts as one of them.
        """
        listed = sum(abs(after - before) for before, after in zip(self.base, self.final, strict=True))
        return min(1.0, 0.5 * (listed + abs(sum(self.base) - sum(self.final))))


@dataclass
class RowTrace:
    """Counters and records of one row, which in beam search is one beam of an item."""

    vision_tokens: int = 0
    step_count: int = 0  # steps until the row ended
    applied: int = 0  # steps at which the method had an effect
    changed: int = 0  # steps at which its best token differs from the model's
    outside: int = 0  # steps outside the method's phase, which it left unchanged
    plausible_tokens: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    floor: float = 0.0  # names with less support were withheld
    support: dict[str, float] = field(default_factory=dict)  # of each category of names, with a floor and an image
    prevented: list[tuple[int, str]] = field(
        default_factory=list
    )  # step and category, where the likeliest was withheld
    lowest_floor: float = 0.0  # lower floors could change a greedy answer; infinite if every floor could
    exhausted: int = 0  # steps at which the method left withheld names only, and the model's distribution was taken
    overruled: int = 0  # steps at which another processor, such as a schema, allowed withheld names only

    @property
    def withheld(self) -> dict[str, float]:
        """The categories below the floor with their support, the best supported first."""
        below = [(name, value) for name, value in self.support.items() if value < self.floor]
        return dict(sorted(below, key=lambda pair: -pair[1]))

    def copy(self) -> RowTrace:
        """Return a copy whose counters can change independently."""
        return replace(
            self, plausible_tokens=[*self.plausible_tokens], records=[*self.records], prevented=[*self.prevented]
        )


@dataclass(repr=False)
class Trace:
    """What a method did in one call of `generate`. Pass one as `trace=`; the next call that gets it empties it first.

    With `record=True`, every step keeps its candidates (the best `candidates` of them), its selected vision token and
    all divergences.
    """

    record: bool = False
    candidates: int = 64
    rows: list[RowTrace] = field(default_factory=list)
    method: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    links: list[Trace] = field(default_factory=list)  # in a chain, the counters of each of its methods
    drafted: int = 0  # tokens that speculative decoding drafted
    accepted: int = 0  # drafted tokens that were accepted; each saved a forward

    def __repr__(self) -> str:
        if not self.rows:
            return f"Trace(record={self.record}, nothing decoded yet)"
        totals = self.summary()
        counts = ", ".join(
            f"{name}={totals[name]}" for name in ("rows", "vision_tokens", "steps", "applied", "changed")
        )
        return f"Trace({self.name!r}, {counts}{', recorded' if self.record else ''})"

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.method.get("name", ""))

    @property
    def label(self) -> str:
        """The method as typed on the command line, without settings that equal its defaults."""
        return method_text(self.name, {key: value for key, value in self.method.items() if key != "name"})

    def summary(self) -> dict[str, Any]:
        """Return totals over all rows."""
        sizes = [size for row in self.rows for size in row.plausible_tokens]
        return {
            "rows": len(self.rows),
            "rows_without_image": sum(row.vision_tokens == 0 for row in self.rows),
            "vision_tokens": sum(row.vision_tokens for row in self.rows),
            "steps": sum(row.step_count for row in self.rows),
            "applied": sum(row.applied for row in self.rows),
            "changed": sum(row.changed for row in self.rows),
            "median_plausible_tokens": median(sizes) if sizes else None,
            "largest_plausible_tokens": max(sizes, default=None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON-ready form."""
        content: dict[str, Any] = _as_json(asdict(self))
        return {**content, "summary": self.summary()}

    def save(self, path: str | Path) -> Path:
        """Write the trace as JSON, and return the path. Numbers that are not finite become null."""
        write_text(Path(path), json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False))
        return Path(path)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with one line per recorded step; needs pandas and `Trace(record=True)`."""
        need("pandas")
        import pandas

        if not self.record:
            raise RevisitError("This trace has counters only: decode with Trace(record=True) to record its steps.")
        lines = [_line(number, record) for number, row in enumerate(self.rows) for record in row.records]
        whole = ("token", "instead_of_token", "layer", "vision_token", "patch_row", "patch_col")
        return pandas.DataFrame(lines, columns=list(_line(0, _EMPTY))).astype(dict.fromkeys(whole, "Int64"))


def row_trace(trace: Trace, number: int, beams: int = 1) -> Trace:
    """Return the trace of one item of a batch, which has one row per beam, as if it had been decoded alone."""
    rows = trace.rows[number * beams : (number + 1) * beams]
    return replace(trace, rows=rows, links=[row_trace(link, number, beams) for link in trace.links])


def add_text(trace: Trace, tokenizer: Tokenizer) -> None:
    """Fill in the text of every recorded token and candidate."""
    for row in trace.rows:
        tokens = [record.token for record in row.records if record.token is not None]
        texts = iter(token_texts(tokenizer, tokens))
        for record in row.records:
            record.text = None if record.token is None else next(texts)
            record.texts = [token_text(tokenizer, token) for token in record.ids]


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it: tensors as lists, and None for a number that is not finite."""
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _as_json(value.tolist()) if hasattr(value, "tolist") else value


_EMPTY = StepRecord(1, None, [0], [1.0], None, [1.0], 1)


def _line(row: int, record: StepRecord) -> dict[str, Any]:
    place = record.ids.index(record.token) if record.token in record.ids else None
    return {
        "row": row,
        "step": record.step,
        "token": record.token,
        "text": record.text,
        "base": None if place is None else record.base[place],  # of the chosen token
        "vision": None if place is None or record.vision is None else record.vision[place],
        "final": None if place is None else record.final[place],
        "plausible_tokens": record.plausible_tokens,
        "changed": record.changed,
        "instead_of_token": record.instead_of,
        "instead_of": record.instead_of_text,
        "layer": record.layer,
        "vision_token": record.vision_token,
        "patch_row": record.patch_row,
        "patch_col": record.patch_col,
        "divergence": record.divergence,
        "weight": record.weight,
    }
