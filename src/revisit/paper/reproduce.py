"""`revisit reproduce`: run the evaluations behind a table of the paper, and compare the measured numbers with the published ones.

All answers are stored in one folder, so a killed command resumes, and tables share answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from revisit.decoding.method_id import MethodId
from revisit.eval.config import EvalConfig
from revisit.eval.log import Log
from revisit.eval.report.document import Block, Document, Section, Table, Text
from revisit.eval.run import Reporter, run
from revisit.io.files import inside, slug
from revisit.io.records import Fields
from revisit.methods.revisit import ReVisiT
from revisit.paper import published
from revisit.paper.ablation import Panel, ablate, ablation_sections, paper_panels, read_panels
from revisit.paper.grounding import COLUMNS
from revisit.paper.latency import bench_table, table, time_images
from revisit.paper.projection import last_layer
from revisit.paper.published import ALPHAS, Exhibit, Measured, comparison_table
from revisit.paper.report import STUDIES, run_study, study_section
from revisit.paper.study import Stored, Subject


@dataclass(frozen=True)
class Setup:
    """The models, data, output folder and options with which to reproduce rows."""

    out: Path
    models: Mapping[str, str]  # name in the paper -> folder or Hub id
    data: Mapping[str, str]  # benchmark -> folder, generated scenes or `download`
    stand_in: bool = False  # one model replaces all models of the paper
    limit: int | None = None
    batch_size: int = 8
    options: Stored = field(default_factory=dict)  # of EvalConfig: engine, dtype, device_map, …

    def limit_of(self, row: Exhibit) -> int | None:
        """Return the number of items: --limit, and at most the row's own number if the row uses only part of a benchmark."""
        partial = row.kind != "grid" or row.benchmark == "vqav2"
        limits = [n for n in (self.limit, row.items if partial else None) if n is not None]
        return min(limits, default=None)

    def _shared(self, row: Exhibit, name: str, output: str) -> Fields:
        out, limit = str(inside(self.out, output)), self.limit_of(row)
        fields = {"model": self.models[name], "data": self.data[row.benchmark], "limit": limit, "out": out}
        return {**self.options, **fields, "batch_size": self.batch_size}

    def config(self, row: Exhibit, name: str, output: str = "runs") -> EvalConfig:
        """Return the evaluation of one model of a row, under the paper's protocol."""
        alpha = ALPHAS.get((row.benchmark, name))
        methods = tuple(f"revisit:alpha={alpha:g}" if m == "revisit" and alpha else m for m in row.methods)
        shared = self._shared(row, name, output)
        return EvalConfig(**shared, method=methods, benchmark=row.benchmark, preset="paper")

    def subject(self, row: Exhibit, name: str, methods: tuple[str, ...]) -> Subject:
        """Return one model and the images of CHAIR, for a study, which runs in this process."""
        return Subject(**{**self._shared(row, name, "analyses"), "method": methods, "engine": "local"})


def reproduce(rows: Sequence[Exhibit], setup: Setup, reporter: Reporter) -> Document:
    """Run every row and return the document with all tables; rows of one benchmark share their answers."""
    runners = {"grid": _run_grid, "ablation": _run_ablation, "study": _run_study, "latency": _run_latency}
    sections: list[Section] = []
    for number, row in enumerate(rows, 1):
        reporter.note(f"{number} of {len(rows)}: {row.key}, {row.title} ({row.where})")
        missing = [name for name in row.models if name not in setup.models]
        notes: list[Block] = [Text(f"Not run: {', '.join(missing)}.")] if missing else []
        sections += [Section(f"{row.title} ({row.where})", notes), *runners[row.kind](row, setup, reporter)]
    lead = (
        f"Measured numbers next to the paper's ({published.data()['source']}). A published value is inside if the measured 95 % "
        "interval contains it, otherwise outside."
    )
    if setup.stand_in:
        model = next(iter(setup.models.values()))
        lead += (
            f" Here {model} takes the place of all models of the paper: differences are no evidence about the paper."
        )
    return Document("ReVisiT: the paper's tables", lead, sections)


def _names(row: Exhibit, setup: Setup) -> list[str]:
    """Return the names, in the paper, of the row's models that are run."""
    return [name for name in row.models if name in setup.models]


# -- grids ---------------------------------------------------------------------------------------------------------


def _run_grid(row: Exhibit, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    blocks: list[Block] = []
    for name in row.models:
        logs = run(setup.config(row, name), reporter) if name in setup.models else []
        ours = {log.spec.method.name: log for log in logs}
        data = published.table(row.published)[name]
        metrics = list(next(iter(data.values())))
        groups = [metrics[start : start + 6] for start in range(0, len(metrics), 6)]  # six fit on a page
        for group in groups:
            title = f", {group[0]} to {group[-1]}".replace("_", " ") if len(groups) > 1 else ""
            values = {method: {metric: data[method][metric] for metric in group} for method in data}
            measured = {method: _values(ours.get(method), group) for method in values}
            blocks.append(comparison_table(values, measured, f"{name}{title}."))
    yield Section("Values", blocks, level=3)


def _values(log: Log | None, names: Sequence[str]) -> dict[str, Measured]:
    """Return measured values with their intervals, by the paper's names of the metrics."""
    if log is None or log.scores is None:
        return {}
    found = {}
    for name in names:
        # the paper prints MMMU's subjects with blanks, and the mean over them as Overall
        keys = ("macro",) if name == "Overall" else (name, f"{name.replace(' ', '_')}/accuracy")
        key = next((key for key in keys if key in log.scores.metrics), None)
        if key and not math.isnan(log.scores.value(key)[0]):
            found[name] = log.scores.value(key)
    return found


# -- ablations -----------------------------------------------------------------------------------------------------


def _run_ablation(row: Exhibit, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    paper = published.table(row.published)
    for name in _names(row, setup):
        config = setup.config(row, name, row.key)
        base = next(method for method in config.methods_for(setup.models[name]) if isinstance(method, ReVisiT))
        if row.key == "ablation":
            panels, metrics, rows = paper_panels(base), ["CHAIRs", "CHAIRi", "F1"], paper["panels"]
        else:  # VQAv2 by layers and threshold
            methods = tuple(base.replace(layers=entry["layers"], alpha=entry["alpha"]) for entry in paper)
            panels = {"layers": Panel("Layer scope × threshold α", ("layers", "alpha"), methods)}
            metrics, rows = ["token_max"], {"layers": [{**entry, "token_max": entry[name]} for entry in paper]}
        logs = ablate(config, panels, base, reporter)
        yield from ablation_sections(read_panels(Path(config.out)), logs, f"{row.key}-{slug(name)}")
        by_method = {log.spec.method: log for log in logs}
        blocks: list[Block] = []
        for key, panel in panels.items():
            values, ours = {}, {}
            for entry in rows[key]:
                settings = {setting: entry[setting] for setting in panel.columns}
                method = next(m for m in panel.methods if all(getattr(m, k) == v for k, v in settings.items()))
                title = ", ".join(f"{k} {v}" for k, v in settings.items())
                values[title] = {metric: entry[metric] for metric in metrics}
                ours[title] = _values(by_method[MethodId.of(method)], metrics)
            blocks.append(comparison_table(values, ours, f"{panel.title} ({key}), {name}."))
        yield Section(f"Verdicts · {name}", blocks, level=3)


# -- studies -------------------------------------------------------------------------------------------------------


def _run_study(row: Exhibit, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    study = "case-study" if row.key == "token-tables" else row.key
    for name in _names(row, setup)[: 1 if setup.stand_in else None]:  # a stand-in gives the same result for all models
        found = run_study(study, setup.subject(row, name, STUDIES[study].methods), reporter)
        section = study_section(found)
        if row.published:
            section.blocks.append(study_verdicts(row, found["result"]))
        yield section


def study_verdicts(row: Exhibit, result: Stored) -> Table:
    """Compare a study's numbers with the published ones."""
    paper = published.table(row.published)
    if row.key == "hallucinated-steps":
        values = {f"top-{r['k']}": {"recall@k": r["recall"]} for r in paper["recall"]}
        ours = {f"top-{r['k']}": {"recall@k": _share(r)} for r in result["recall"]}
    elif row.key == "projection":
        values = {f"top-{r['k']}": {kind: r[kind][0] for kind in ("full", "objects")} for r in paper["recall"]}
        last = {kind: last_layer(result, kind) for kind in ("full", "objects")}
        ours = {f"top-{r['k']}": {kind: _share(last[kind][r["k"]]) for kind in last} for r in paper["recall"]}
    else:
        values = {r["setting"]: {c: r[c] for c in COLUMNS} for r in paper["rows"]}
        ours = {
            r["setting"]: {c: (r[c], math.nan, math.nan) for c in COLUMNS if r[c] is not None} for r in result["rows"]
        }
    return comparison_table(values, ours, f"{row.title} ({row.where}).")


def _share(row: Mapping[str, float]) -> Measured:
    return 100 * row["recall"], 100 * row["low"], 100 * row["high"]


def _run_latency(row: Exhibit, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    for name in _names(row, setup):
        timings = time_images(setup.subject(row, name, row.methods), reporter)
        theirs = {method: {"ms/token": times["mean"]} for method, times in published.table(row.published)[name].items()}
        ours = {timing.label: {"ms/token": (1e3 * timing.per_token[0], math.nan, math.nan)} for timing in timings}
        caption = "Every image counts once; ms/token is the median over images, ± the largest difference of one, the prompt is timed apart."
        tables = [bench_table(table(timings), caption), comparison_table(theirs, ours, f"{row.title} ({row.where}).")]
        yield Section(f"Time · {name}", list(tables), level=3)
