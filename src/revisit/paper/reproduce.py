"""One command per table: run what a row of the paper needs, and compare the measured numbers with the published ones.

Everything is stored below one folder by the resumable runner, so that a killed command resumes, and tables share answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revisit.eval.compare import compare
from revisit.eval.config import EvalConfig
from revisit.eval.log import Log
from revisit.eval.report.comparisons import comparison_sections
from revisit.eval.report.document import Block, Document, Section, Table, Text
from revisit.eval.run import Reporter, run
from revisit.eval.spec import label
from revisit.explain.files import digest, slug, write_json
from revisit.explain.records import read_json
from revisit.methods.revisit import ReVisiT
from revisit.paper import catalog, published
from revisit.paper.ablation import Panel, ablate, ablation_sections, paper_panels, read_panels
from revisit.paper.catalog import Row
from revisit.paper.grounding import COLUMNS
from revisit.paper.latency import time_answers
from revisit.paper.projection import last_layer
from revisit.paper.published import Measured, comparison_table
from revisit.paper.studies import STUDIES, read_study, run_study, study_section
from revisit.paper.study import Stored, Subject


@dataclass(frozen=True)
class Setup:
    """What a row is reproduced with: models by their names in the paper, data, and where results go."""

    out: Path
    models: Mapping[str, str]  # name in the paper -> folder or Hub id
    data: Mapping[str, str]  # benchmark -> folder, generated scenes, `download` or `hub`
    stand_in: bool = False  # one model in the place of all of the paper's
    limit: int | None = None
    batch_size: int = 8
    options: Stored = field(default_factory=dict)  # engine, workers, address, dtype, device_map

    def limit_of(self, row: Row) -> int | None:
        """Return the number of items: --limit, and never more than the row has if it uses a part of a benchmark."""
        partial = row.kind in ("study", "ablation") or row.benchmark == "vqav2"
        limits = [n for n in (self.limit, row.items if partial else None) if n is not None]
        return min(limits, default=None)

    def config(self, row: Row, name: str, output: str = "runs", **options: Any) -> EvalConfig:
        """Return what is run for one model of a row, by default under the paper's protocol."""
        alpha = catalog.ALPHAS.get((row.benchmark, name))
        methods = [f"revisit:alpha={alpha:g}" if m == "revisit" and alpha else m for m in dict.fromkeys(row.methods)]
        usual = {
            "benchmark": row.benchmark,
            "data": self.data[row.benchmark],
            "limit": self.limit_of(row),
            "preset": "paper",
        }
        return EvalConfig(
            model=self.models[name],
            method=tuple(methods),
            out=str(self.out / output),
            batch_size=self.batch_size,
            **{**usual, **options},
            **self.options,
        )

    def subject(self, name: str, **options: Any) -> Subject:
        """Return one model and the images of CHAIR."""
        dtype, device_map = self.options.get("dtype"), self.options.get("device_map")
        return Subject(model=self.models[name], data=self.data["chair"], dtype=dtype, device_map=device_map, **options)


def reproduce(rows: Sequence[Row], setup: Setup, reporter: Reporter) -> Document:
    """Run every row, those of one benchmark from the same answers, and return the document with all tables."""
    runners = {"grid": _run_grid, "ablation": _run_ablation, "study": _run_study, "methods": _run_methods}
    sections: list[Section] = []
    for number, row in enumerate(rows, 1):
        reporter.note(f"{number} of {len(rows)}: {row.key}, {row.title} ({row.where})")
        missing = [name for name in row.models if name not in setup.models]
        text = f"Benchmark {row.benchmark}, methods {', '.join(dict.fromkeys(row.methods))}."
        text += f" Not run: {', '.join(missing)}." if missing else ""
        sections += [Section(f"{row.title} ({row.where})", [Text(text)]), *runners[row.kind](row, setup, reporter)]
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


def _names(row: Row, setup: Setup) -> list[str]:
    """Return the models of a row that are run, by their names in the paper."""
    return [name for name in row.models if name in setup.models]


# -- grids ---------------------------------------------------------------------------------------------------------


def _run_grid(row: Row, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    done: dict[tuple[str, float | None], dict[str, Log]] = {}  # one model may take the place of several
    blocks: list[Block] = []
    for name in row.models:
        ours: dict[str, Log] = {}
        if name in setup.models:
            key = setup.models[name], catalog.ALPHAS.get((row.benchmark, name))
            ours = done[key] = done.get(key) or {
                log.spec.method_name: log for log in run(setup.config(row, name), reporter)
            }
        data = published.table(row.published)[name]
        metrics = list(next(iter(data.values())))
        groups = [metrics[start : start + 6] for start in range(0, len(metrics), 6)]  # six fit on a page
        for group in groups:
            title = f", {group[0]} to {group[-1]}".replace("_", " ") if len(groups) > 1 else ""
            values = {method: {metric: data[method][metric] for metric in group} for method in data}
            measured = {method: _values(ours.get(method), group) for method in values}
            blocks.append(comparison_table(values, measured, f"{name}{title}.", folded=len(groups) > 1))
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
        value, *bounds = log.scores.value(key) if key else (math.nan,) * 3
        if not math.isnan(value):
            found[name] = Measured(value, *(None if math.isnan(bound) else bound for bound in bounds))
    return found


# -- ablations -----------------------------------------------------------------------------------------------------


def _run_ablation(row: Row, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    paper = published.table(row.published)
    for name in _names(row, setup):
        config = setup.config(row, name, row.key)
        base = next(method for method in config.methods_for(setup.models[name]) if isinstance(method, ReVisiT))
        if row.key == "ablation":
            panels, metrics, rows = paper_panels(base), ["CHAIRs", "CHAIRi", "F1"], paper["panels"]
        else:  # VQAv2 by layers and threshold
            methods = tuple(base.replace(layers=entry["layers"], alpha=entry["alpha"]) for entry in paper)
            panels = {"layers": Panel("layers", "Layer scope × threshold α", ("layers", "alpha"), methods, base)}
            metrics, rows = ["token_max"], {"layers": [{**entry, "token_max": entry[name]} for entry in paper]}
        logs = ablate(config, panels, reporter)
        yield from ablation_sections(read_panels(Path(config.out)), logs, f"{row.key}-{slug(name)}")
        by_method = {log.spec.method: log for log in logs}
        blocks: list[Block] = []
        for key, panel in panels.items():
            values, ours = {}, {}
            for entry in rows[key]:
                settings = {setting: entry[setting] for setting in panel.settings}
                method = next((m for m in panel.methods if all(getattr(m, k) == v for k, v in settings.items())), None)
                title = ", ".join(f"{k} {v}" for k, v in settings.items())
                values[title] = {metric: entry[metric] for metric in metrics}
                ours[title] = _values(by_method.get(label(method)) if method else None, metrics)
            blocks.append(comparison_table(values, ours, f"{panel.title} ({key}), {name}.", first="Setting"))
        yield Section(f"Verdicts · {name}", blocks, level=3)


# -- studies -------------------------------------------------------------------------------------------------------


def _run_study(row: Row, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    study = "case-study" if row.key == "token-tables" else row.key
    output, methods = str(setup.out / "analyses"), STUDIES[study].methods
    for name in _names(row, setup):
        subject = setup.subject(
            name, limit=setup.limit_of(row), output=output, methods=methods, batch_size=setup.batch_size
        )
        found = read_study(run_study(study, subject, reporter))
        section = study_section(found)
        if row.published:
            section.blocks.append(study_verdicts(row, name, found["result"]))
        yield section


def study_verdicts(row: Row, model: str, result: Stored) -> Table:
    """Compare a study's numbers with the published ones."""
    paper = published.table(row.published)
    if row.key == "hallucinated-steps":
        values = {f"top-{r['k']}": {"recall@k": r["recall"]} for r in paper["recall"]}
        ours = {f"top-{r['k']}": {"recall@k": _share(r)} for r in result["recall"]}
    elif row.key == "projection":
        values = {f"top-{r['k']}": {kind: r[kind][0] for kind in ("full", "objects")} for r in paper["recall"]}
        last = {kind: last_layer(result, kind) for kind in ("full", "objects")}
        ours = {f"top-{r['k']}": {kind: _share(last[kind][r["k"]]) for kind in last} for r in paper["recall"]}
    elif row.key == "gt-vs-hal":
        values = {r["setting"]: {c: r[c] for c in COLUMNS} for r in paper["rows"]}
        ours = {r["setting"]: {c: Measured(r[c]) for c in COLUMNS if r[c] is not None} for r in result["rows"]}
    else:
        values = {method: {"ms/token": times["mean"]} for method, times in paper[model].items()}
        ours = {r["method"]: {"ms/token": Measured(r["ms"])} for r in result["rows"] if r["ms"] is not None}
    return comparison_table(values, ours, f"{row.title} ({row.where}).", first="What")


def _share(row: Mapping[str, float]) -> Measured:
    return Measured(100 * row["recall"], 100 * row["low"], 100 * row["high"])


# -- every method --------------------------------------------------------------------------------------------------


def _run_methods(row: Row, setup: Setup, reporter: Reporter) -> Iterator[Section]:
    """Run every method with its recommended settings: scores, and the time of an answer; or why it does not support the model."""
    for name in _names(row, setup):
        model, length = setup.models[name], int(row.tokens)
        options: dict[str, Any] = {"preset": None, "limit": setup.limit, "max_new_tokens": length}
        data = {benchmark: setup.data[benchmark] for benchmark in ("chair", "pope")}
        benchmarks = ("chair", "pope:settings=coco_adversarial")
        config = setup.config(row, name, benchmark=benchmarks, data=data, **options)
        methods = {method.name: method for method in config.methods_for(model)}
        file = setup.out / f"time-{digest([model, length, [label(m) for m in methods.values()]])[:12]}.json"
        if not file.exists():
            reporter.note(f"time per token of {len(methods)} methods")
            subject = setup.subject(name, limit=1)
            inputs = subject.inputs(subject.items)
            write_json(file, time_answers(subject.loaded[0], inputs, methods, new_tokens=length))
        times = read_json(file)
        unsupported = [(method, found) for method, found in times.items() if isinstance(found, str)]
        able = tuple(method for key, method in methods.items() if not isinstance(times[key], str))
        yield from comparison_sections(compare(run(config.replace(method=able), reporter)))
        caption = (
            f"A whole answer of {length} tokens, × greedy: the median of three rounds in which the methods took turns. Greedy decoding "
            "(OPERA: beams), settings recommended for the model."
        )
        lines = [(m.name, f"{float(times[m.name]) / float(times['greedy']):.2f}") for m in able]
        blocks: list[Block] = [Table(("Method", "time ×"), lines, caption)]
        if unsupported:
            blocks.append(Table(("Method", "Why it does not run"), unsupported, "Not run.", left=2))
        yield Section(f"Time · {model}", blocks, level=3)
