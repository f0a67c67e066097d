"""Everything measured below a folder as one report: main tables, latency, ablations, studies, cases, and how each was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from revisit.benchmarks import registry
from revisit.benchmarks.base import Metric
from revisit.errors import RevisitError
from revisit.evaluation.comparison import Table as Compared
from revisit.evaluation.comparison import compare_folder
from revisit.evaluation.store import read_answers, read_json, read_results, slug
from revisit.paper import figures, published
from revisit.paper.ablation import FILE as ABLATION
from revisit.paper.ablation import read_ablation
from revisit.paper.sections import ablation_sections, number, ranked, study_section, triple
from revisit.paper.study import CAPTIONS, FOLDER, read_study
from revisit.report.comparisons import difference_tables, seed_tables, value_table
from revisit.report.document import Block, Cell, Document, Made, Section, Table, Text, rows_of

STUDY_ORDER = ("hallucinated-steps", "gt-vs-hal", "projection", "vision-words", "case-study")


@dataclass(frozen=True)
class Found:
    """What lies below a folder: runs (ablations among them) and studies."""

    runs: list[tuple[Path, dict[str, Any]]]
    ablations: list[tuple[Path, dict[str, Any], dict[str, Any]]]
    studies: list[dict[str, Any]]


def gather(folder: Path) -> Found:
    """Everything below `folder` that a report can show; refuses a folder with nothing."""
    if not folder.is_dir():
        raise RevisitError(f"{folder} is no folder; give the --out folder of `revisit eval`, `ablate` or `analyze`.")
    runs, ablations = [], []
    for path in sorted(folder.rglob("results.json")):
        place, found = path.parent, read_json(path)
        if not isinstance(found, dict) or "cells" not in found:
            continue  # somebody else's file
        results = read_results(place)
        runs.append((place, results))
        if (place / ABLATION).exists():
            ablations.append((place, read_ablation(place), results))
    files = sorted(path for path in folder.rglob("*.json") if path.parent.name == FOLDER)
    studies = [
        {**study, "name": slug(path.relative_to(folder).with_suffix("").as_posix(), 100)}
        for path in files
        if (study := read_study(path))["study"] in STUDY_ORDER
    ]
    studies.sort(key=lambda study: STUDY_ORDER.index(study["study"]))
    if not runs and not studies:
        raise RevisitError(
            f"There is nothing to report in {folder}: no results.json of `revisit eval` or `ablate`, no studies of `revisit analyze`."
        )
    return Found(runs, ablations, studies)


def build(folder: Path, *, beside: bool = False, title: str = "ReVisiT: results", resamples: int = 4999) -> Document:
    """The report of a folder; `beside` prints the paper's own figures too, marked as published."""
    found = gather(folder)
    sections = [*main_sections(found, beside, resamples), *latency_section(found, folder, beside)]
    if found.ablations:
        sections.append(Section("Ablations", [Text(ABLATION_TEXT)]))
        for place, about, results in found.ablations:
            sections += ablation_sections(about, results, f"ablation-{slug(_relative(place, folder))}", beside)
    if found.studies:
        sections.append(Section("Analyses", [Text(STUDY_TEXT)]))
        sections += [study_section(study, beside) for study in found.studies if study["study"] != "case-study"]
        cases = [study_section(study, beside) for study in found.studies if study["study"] == "case-study"]
        if cases:
            sections += [Section("Case studies"), *cases]
    sections.append(made_section(found, folder))
    lead = _lead(found, beside)
    return Document(title, lead, sections, published.source())


ABLATION_TEXT = "Each panel varies some settings of ReVisiT and keeps the others at the main configuration."
STUDY_TEXT = (
    "Object words are CHAIR's synonyms of COCO categories that the model's tokenizer writes as one token; a word is "
    "ground truth (GT) for a picture if its category is in it, otherwise it is hallucinated (Hal)."
)


def _lead(found: Found, beside: bool) -> str:
    models = sorted({cell["model"]["name"] for _, results in found.runs for cell in results["cells"]})
    models = models or sorted({study["settings"]["model"] for study in found.studies})
    text = f"Models: {', '.join(models)}. Everything here was measured by the commands printed below each table"
    return text + (", except what is marked as published." if beside else ".")


def _relative(place: Path, folder: Path) -> str:
    return place.relative_to(folder).as_posix() if place != folder else "."


# -- main tables ---------------------------------------------------------------------------------------------------


def main_sections(found: Found, beside: bool, resamples: int) -> list[Section]:
    """One section per benchmark: values, differences to plain decoding, sub-settings."""
    plain = [(place, results) for place, results in found.runs if not _captions_only(place)]
    tables: dict[str, list[tuple[Path, dict[str, Any], Compared]]] = {}
    problems: list[str] = []
    for place, results in plain:
        keys = _main_keys(place, results)
        if not keys:
            continue
        for table in compare_folder(place, resamples=resamples, problems=problems, keys=keys):
            tables.setdefault(table.benchmark, []).append((place, results, table))
    if not tables and not problems:
        return []
    sections = [Section("Main results", [Text(MAIN_TEXT), *map(Text, problems)])]
    for benchmark in tables:
        runs: dict[Path, list[Compared]] = {}
        for place, _, table in tables[benchmark]:
            runs.setdefault(place, []).append(table)
        blocks: list[Block] = []
        for place, own in runs.items():
            results = dict(plain)[place]
            blocks += [value_table(own), *difference_tables(own), *seed_tables(own), *detail_tables(results, benchmark)]
            cells = [cell for cell in results["cells"] if cell["benchmark"]["name"] == benchmark]
            blocks += made_cells(cells)
        if beside:
            blocks += published_tables(benchmark)
        sections.append(Section(registry.title(benchmark), blocks, level=3))
    return sections


def _captions_only(place: Path) -> bool:
    """Whether a run is nothing but the captions that the studies beside it read."""
    return place.name == CAPTIONS and (place.parent / FOLDER).is_dir()


def _main_keys(place: Path, results: Mapping[str, Any]) -> set[str]:
    """The finished cells of a run that are not there for an ablation alone."""
    cells = [cell for cell in results["cells"] if cell["status"] == "complete"]
    if not (place / ABLATION).exists():
        return {cell["key"] for cell in cells}
    panels = read_ablation(place)["panels"]
    varied = {row["method"] for panel in panels for row in panel["rows"]}
    others = [cell for cell in cells if cell["method"]["label"] not in varied]
    asked = {_question(cell) for cell in others if cell["method"]["label"] != "greedy"}
    return {cell["key"] for cell in others if _question(cell) in asked}


def _question(cell: Mapping[str, Any]) -> tuple[str, str]:
    return cell["model"]["name"], cell["benchmark"]["name"]


MAIN_TEXT = (
    "Best in bold, second best underlined, 95 % intervals in brackets. Differences are paired by item: p-value of a permutation test after "
    "Holm's correction over the table, and the bootstrap interval at the level of that test."
)


def cell_name(cell: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> str:
    """A cell's method, with its seed where the method was run with several."""
    label = str(cell["method"]["label"])
    seeds = {other["seed"] for other in cells if other["method"]["label"] == label}
    return f"{label}, seed {cell['seed']}" if len(seeds) > 1 else label


def detail_tables(results: Mapping[str, Any], benchmark: str) -> list[Table]:
    """Sub-settings (POPE's sources and settings, MMMU's subjects) as rows, methods as columns."""
    cells = [c for c in results["cells"] if c["status"] == "complete" and c["benchmark"]["name"] == benchmark]
    found = []
    for model in dict.fromkeys(cell["model"]["name"] for cell in cells):
        own = [cell for cell in cells if cell["model"]["name"] == model]
        names = [name for name in own[0]["metrics"] if "/" in name and own[0]["metrics"][name]["better"]]
        parts = list(dict.fromkeys(name.rsplit("/", 1)[0] for name in names))
        kinds = [k for k in dict.fromkeys(name.rsplit("/", 1)[1] for name in names) if k != "recall"]
        if len(parts) < 2:
            continue
        lines = []
        for part in parts:
            line: list[Cell | str] = [part.replace("_", " ")]
            for kind in kinds:
                name = f"{part}/{kind}"
                about = own[0]["metrics"].get(name)
                if about is None:
                    line += [""] * len(own)
                    continue
                metric = Metric.from_record(name, about)
                line += [
                    Cell(number(triple(cell, metric)[0], metric.decimals), rank)
                    for cell, rank in zip(own, ranked(own, metric), strict=True)
                ]
            lines.append(line)
        found.append(
            Table(
                ("Setting", *(cell_name(cell, own) for _ in kinds for cell in own)),
                rows_of(lines),
                f"{registry.title(benchmark)}, {model}: {registry.parts(benchmark)}.",
                groups=tuple((kind, len(own)) for kind in kinds),
                folded=len(parts) > 9,
            )
        )
    return found


def published_tables(benchmark: str) -> list[Block]:
    """The paper's tables of a benchmark."""
    if benchmark not in published.names():
        return []
    blocks: list[Block] = [
        _published(published.table(benchmark), f"{registry.title(benchmark)} as the paper reports it.")
    ]
    if benchmark == "chair":
        blocks.append(_published(published.table("chair_models"), "CHAIR across eight models.", by_model=True))
    if benchmark == "vqav2":
        rows = published.table("ablation_vqav2")
        models = ("Qwen2.5-VL-7B", "InternVL3-8B")
        blocks.append(
            Table(
                ("Layer scope", "α", *models),
                rows_of([(r["layers"], f"{r['alpha']:g}", *(number(r[m]) for m in models)) for r in rows]),
                "VQAv2 accuracy by layer scope and threshold.",
                published=True,
                left=2,
            )
        )
    for full, caption in (("pope_full", "every source and setting"), ("mmmu_subjects", "every subject")):
        if full.startswith(benchmark):
            blocks += _published_details(published.table(full), f"{registry.title(benchmark)}, {caption}")
    return blocks


def _published(data: Mapping[str, Any], caption: str, by_model: bool = False) -> Table:
    models = list(data)
    metrics = list(next(iter(data[models[0]].values())))
    if by_model:
        rows = [
            (model, published.NAMES[method], *(number(values[m]) for m in metrics))
            for model in models
            for method, values in data[model].items()
        ]
        return Table(("Model", "Method", *metrics), rows_of(rows), caption, published=True, left=2, folded=True)
    rows = [
        (published.NAMES[method], *(number(data[model][method][m]) for model in models for m in metrics))
        for method in data[models[0]]
    ]
    groups = tuple((model, len(metrics)) for model in models)
    heads = ("Method", *(m for _ in models for m in metrics))
    return Table(heads, rows_of(rows), caption, groups=groups, published=True)


def _published_details(data: Mapping[str, Any], caption: str) -> list[Block]:
    blocks: list[Block] = []
    for model, methods in data.items():
        parts = list(next(iter(methods.values())))
        rows = [(part.replace("_", " "), *(number(values[part]) for values in methods.values())) for part in parts]
        heads = ("Setting", *(published.NAMES[method] for method in methods))
        blocks.append(Table(heads, rows_of(rows), f"{caption}, {model}.", published=True, folded=True))
    return blocks


# -- latency -------------------------------------------------------------------------------------------------------


def latency_section(found: Found, folder: Path, beside: bool) -> list[Section]:
    """Milliseconds per generated token, mean and standard deviation over the answers of each cell."""
    blocks: list[Block] = []
    for place, results in found.runs:
        if (place / ABLATION).exists():
            continue
        longest, before, shown = _longest_answers(results), len(blocks), []
        groups: dict[tuple[str, str], list[tuple[str, float, float, int]]] = {}
        for cell in results["cells"]:
            key = (cell["model"]["name"], cell["benchmark"]["name"])
            if cell["status"] != "complete" or longest[key[0]] != key[1]:
                continue
            times = per_token(place / cell["path"] / "answers.jsonl")
            if len(times) >= 2:
                name = cell_name(cell, results["cells"])
                row = (name, mean(times), stdev(times), cell["batch_size"])
                groups.setdefault(key, []).append(row)
                shown.append(cell)
        for (model, benchmark), rows in groups.items():
            if len(rows) < 2:
                continue
            base = next((row[1] for row in rows if row[0] == "greedy"), rows[0][1])
            lines = [(name, f"{m:.2f} ± {sd:.2f}", f"{m / base:.2f}×") for name, m, sd, _ in rows]
            blocks.append(
                Table(
                    ("Method", "ms/token", "relative"),
                    rows_of(lines),
                    f"{registry.title(benchmark)}, {model}: time per generated token, prefill included, mean ± standard "
                    f"deviation over answers (batches of {rows[0][3]}; an answer has its share of its batch's time).",
                )
            )
            name = f"latency-{slug(_relative(place, folder))}-{slug(model)}"
            caption = f"Time per generated token, {model}; bars are standard deviations over answers."
            blocks.append(figures.latency(name, [(n, m, sd) for n, m, sd, _ in rows], caption))
        if len(blocks) > before:
            blocks += made_cells(shown)
    if not blocks:
        return []
    if beside:
        data = published.table("latency")
        printed = [
            (published.NAMES[method], *(f"{data[m][method]['mean']:.1f} ± {data[m][method]['sd']:.1f}" for m in data))
            for method in next(iter(data.values()))
        ]
        caption = "Time per token (ms) on an RTX A6000, 300 samples."
        blocks.append(Table(("Method", *data), rows_of(printed), caption, published=True))
    return [Section("Latency", blocks)]


def _longest_answers(results: Mapping[str, Any]) -> dict[str, str]:
    """Model -> the benchmark with the longest answers: short ones say more about the prefill than about a method."""
    lengths: dict[str, dict[str, float]] = {}
    for cell in results["cells"]:
        if cell["answers"]:
            own = lengths.setdefault(cell["model"]["name"], {})
            own[cell["benchmark"]["name"]] = max(
                own.get(cell["benchmark"]["name"], 0), cell["new_tokens"] / cell["answers"]
            )
    return {model: max(own, key=own.__getitem__) for model, own in lengths.items()}


def per_token(path: Path) -> list[float]:
    """Milliseconds per token of every stored answer that has tokens and a time."""
    if not path.exists():
        return []
    return [1000 * line.seconds / len(line.tokens) for line in read_answers(path) if line.tokens and line.seconds]


# -- how it was made -----------------------------------------------------------------------------------------------


def made_cells(cells: Iterable[Mapping[str, Any]]) -> list[Made]:
    """The commands that made some cells of a run, each once, and what decides their answers."""
    found = []
    for cell in cells:
        made = cell["provenance"]
        names = {"limit": made["limit"], "seed": made["seed"], "batch size": made["batch_size"]}
        names["data"] = Path(made["data"]).name if made["data"] else None
        text = ", ".join(f"{k} {v}" for k, v in names.items() if v is not None)
        found.append(Made(shlex.join(made["argv"]), text))
    return list(dict.fromkeys(found))


def made_section(found: Found, folder: Path) -> Section:
    """Versions, machine, and the settings of every run, in full."""
    places = [("run", _relative(place, folder), results) for place, results in found.runs]
    places += [("study", study["study"], study) for study in found.studies]
    rows = []
    for kind, name, about in places:
        machine = about["environment"]
        libraries = machine["libraries"]
        rows.append(
            (
                f"{kind} {name}",
                shlex.join(machine["argv"]),
                about["written"],
                (machine["git"] or "–")[:12],
                f"{libraries.get('torch', '–')} / {libraries.get('transformers', '–')}",
                f"{machine['platform'].split('-')[0]} {machine['machine']}, {machine['cpus']} CPUs",
            )
        )
    settings = json.dumps([about["settings"] for _, _, about in places], ensure_ascii=False, default=str)
    heads = ("What", "Command", "Written", "Commit", "torch / transformers", "Machine")
    table = Table(heads, rows_of(rows), "Commands, versions and machines.", left=6)
    return Section("How it was made", [table, Made("settings", settings)])
