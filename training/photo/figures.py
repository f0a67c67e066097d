"""Draw the figures of docs/research/note.md from stored tables: `python -m training.photo.figures docs/research/note docs/images`.

Those of decodings have the numbers of `revisit compare`; `check.csv` has results of `python -m studies check`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

RUNS = {
    "photo": "photo, 700 photos",
    "twin": "twin, 300 photos",
    "unusual": "tiny, 1,000 unusual scenes",
    "usual": "tiny, 500 usual scenes",
}
DECODINGS = {
    "revisit": ("the paper's setting", "#d9822b", "o"),
    "revisit(once=1.0)": ("the paper's setting, once=1", "#d9822b", "D"),
    "revisit(weight=agreement, neighbors=8)": ("adaptive weight", "#3b8fd9", "o"),
    "revisit(weight=agreement, neighbors=8, once=1.0)": ("adaptive weight, once=1", "#2fa866", "o"),
}
METRICS = {"CHAIRi": "CHAIR_I ↓", "Recall": "recall ↑", "DistinctF1": "distinct F1 ↑", "Rep": "repeats ↓"}
INK = "#808080"  # readable on white and on black
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "note",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Row = dict[str, str]


def draw(tables: Path, images: Path) -> None:
    """Write `note-decodings.svg` and `note-check.svg` from the tables of a folder."""
    with plt.rc_context(STYLE):
        for name, figure in (("decodings", decodings(tables)), ("check", detectors(tables / "check.csv"))):
            figure.savefig(images / f"note-{name}.svg", transparent=True, metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def decodings(tables: Path) -> Figure:
    """Draw the differences from greedy decoding with their corrected intervals, a row for each run."""
    figure, grid = plt.subplots(len(RUNS), len(METRICS), figsize=(9, 6), sharex="col", squeeze=False)
    for axes, (run, title) in zip(grid, RUNS.items(), strict=True):
        rows = {(row["method"], row["metric"]): row for row in read(tables / f"{run}.csv")}
        for ax, metric in zip(axes, METRICS, strict=True):
            ax.axvline(0, color=INK, linewidth=0.8)
            for place, (method, (_, color, marker)) in enumerate(DECODINGS.items()):
                if row := rows.get((method, metric)):
                    point(ax, -place, [float(row[f"difference{end}"]) for end in ("", "_low", "_high")], color, marker)
            ax.set(yticks=[], ylim=(-len(DECODINGS) + 0.4, 0.6))
        axes[0].set_title(title, loc="left", fontsize=9, fontweight="bold")
    for ax, metric in zip(grid[-1], METRICS.values(), strict=True):
        ax.set_xlabel(metric)
    marks = [Line2D([], [], color=color, marker=marker, label=label) for label, color, marker in DECODINGS.values()]
    figure.legend(handles=marks, loc="upper center", ncols=len(marks), frameon=False, bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    return figure


def detectors(table: Path) -> Figure:
    """Draw the AUROC of scores of words with intervals, by model and kind of text."""
    rows = read(table)
    groups = list(dict.fromkeys((row["model"], row["text"]) for row in rows))
    figure, axes = plt.subplots(1, len(groups), figsize=(9, 2.4), sharex=True, sharey=True)
    names = list(dict.fromkeys(row["score"] for row in rows))
    for ax, group in zip(axes, groups, strict=True):
        ax.axvline(0.5, color=INK, linewidth=0.8)
        for row in rows:
            if (row["model"], row["text"]) == group:
                place = -names.index(row["score"])
                color = "#2fa866" if row["score"] == "check" else "#3b8fd9"
                point(ax, place, [float(row[key]) for key in ("auroc", "low", "high")], color, "o")
        ax.set(yticks=[-k for k in range(len(names))], xlim=(0.2, 1.02))
        ax.set_yticklabels(names)
        ax.set_title(", ".join(group), loc="left", fontsize=9, fontweight="bold")
        ax.set_xlabel("AUROC ↑")
    figure.tight_layout()
    return figure


def point(ax: Axes, place: float, values: list[float], color: str, marker: str) -> None:
    """Draw a value with the ends of its interval."""
    value, low, high = values
    ax.plot([low, high], [place, place], color=color, linewidth=1.5)
    ax.plot([value], [place], color=color, marker=marker, markersize=5)


def read(table: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
