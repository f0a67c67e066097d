"""`revisit reproduce`: the paper's tables and figures, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.errors import RevisitError, need, unknown

if TYPE_CHECKING:
    from revisit.eval.report.document import Section
    from revisit.paper.catalog import Row

SCENES = "scenes:unusual:8"  # the embedded models' data unless --data names others


def reproduce(
    table: str = typer.Argument("", help="Name of a table, several separated by commas, or all; see --list."),
    list_: bool = typer.Option(False, "--list", help="List the tables and figures, and what each needs."),
    plan: bool = typer.Option(
        False, "--plan", help="Print the plan (models, downloads, answers, tokens, disk) and exit."
    ),
    models: str = typer.Option(
        None, help="Only these models of the paper, separated by commas; NAME=FOLDER loads a model from a folder."
    ),
    model: str = typer.Option(None, "--model", "-m", help="Use one model instead of the paper's, for example tiny."),
    data: list[str] = typer.Option(
        None,
        help="As for `revisit eval`. Default: download, or generated scenes for the embedded model.",
    ),
    out: Path = typer.Option(Path("reproduced"), "--out", "-o", help="Folder for answers, results and report.html."),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    engine: str = typer.Option("local", help="Engine for the benchmarks: local, ray or vllm; studies run locally."),
    workers: int = typer.Option(None, min=1, help="With --engine ray: number of workers."),
    address: str = typer.Option(None, help="With --engine ray: address of the cluster."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Reproduce the paper's tables and figures; a stopped run resumes.

    Prints the plan, runs what is missing, and writes measured numbers next to the published ones.

    Examples:

      revisit reproduce --list

      revisit reproduce chair --models LLaVA-1.5-7B --plan

      revisit reproduce all --model tiny --out runs/tiny
    """
    from revisit.eval.report.terminal import print_section
    from revisit.paper import catalog

    if list_:
        print_section(_listing())
        return
    if not table:
        raise RevisitError("No table: `revisit reproduce --list` lists them, `revisit reproduce all` runs them all.")
    if models is not None and model is not None:
        raise RevisitError("--models selects models of the paper and --model replaces them: use one of the two.")
    rows = catalog.find(table)
    chosen = _models(models, model)
    print_section(_plan(rows, chosen, model, limit))
    if plan:
        return
    from revisit.cli.progress import reporter
    from revisit.eval.benchmarks.io.places import DOWNLOAD, parse_data
    from revisit.eval.benchmarks.language import require_data
    from revisit.eval.report.document import write
    from revisit.explain.files import make_folder
    from revisit.models.config import EMBEDDED
    from revisit.paper.reproduce import Setup
    from revisit.paper.reproduce import reproduce as run

    need("scipy", "statsmodels", "matplotlib")
    if any(row.benchmark == "chair" for row in rows):
        require_data()
    place = data or (SCENES if model == EMBEDDED else DOWNLOAD)
    setup = Setup(
        make_folder(out),
        chosen,
        parse_data(place, list(dict.fromkeys(name for row in rows for name in (row.benchmark, *row.further)))),
        model is not None,
        limit,
        batch_size,
        {
            "engine": engine,
            "workers": workers,
            "address": address,
            "dtype": dtype,
            "device_map": device_map,
        },
    )
    with reporter(quiet, out / "runs") as progress:
        document = run(rows, setup, progress)
    files = write(document, out)
    print(f"Wrote {files[0]}, {files[1]} and {len(document.figures())} figures.")


def _models(names: str | None, model: str | None) -> dict[str, str]:
    """Name in the paper -> folder or Hub id."""
    from revisit.paper.catalog import MODELS

    if model is not None:
        return dict.fromkeys(MODELS, model)
    if names is None:
        return {name: about.hub for name, about in MODELS.items()}
    found = {}
    for entry in filter(None, (part.strip() for part in names.split(","))):
        name, _, place = entry.partition("=")
        if name not in MODELS:
            raise unknown("model of the paper", name, MODELS)
        found[name] = place or MODELS[name].hub
    return found


def _listing() -> Section:
    from revisit.eval.report.document import Section, Table
    from revisit.paper.catalog import ROWS

    lines = [
        (row.key, row.where, row.title, ", ".join(row.models), row.benchmark, f"{row.items:,}", row.data)
        for row in ROWS.values()
    ]
    heads = ("Name", "In the paper", "What", "Models", "Benchmark", "Items", "Data")
    table = Table(heads, lines, "Run one with `revisit reproduce NAME`.", left=5)
    return Section("The paper's tables and figures", [table])


def _plan(rows: list[Row], chosen: dict[str, str], model: str | None, limit: int | None) -> Section:
    from revisit.eval.report.document import Section, Table, Text
    from revisit.models.config import EMBEDDED
    from revisit.paper.catalog import MODELS, answers

    lines, seen = [], set()
    for row in rows:
        for name in [name for name in row.models if name in chosen][: 1 if model else None]:
            seen.add(name)
            size = "–" if model else f"{MODELS[name].gigabytes:.0f} GB"
            count = answers(row, limit)
            about = (f"{count:,}", f"{count * row.tokens:,.0f}", f"{row.disk:.1f} GB")
            lines.append((row.key, chosen[name], size, *about))
    download = 0.0 if model else sum(MODELS[name].gigabytes for name in seen)
    disk = sum({row.benchmark: row.disk for row in rows}.values())
    heads = ("Table", "Model", "Download", "Answers", "Tokens", "Data")
    text = (
        f"{download:.0f} GB of models and about {disk:.1f} GB of data on disk; answers shared by several rows are counted in each. "
        "`revisit bench` measures the time per token of a model and method on your machine."
    )
    if model == EMBEDDED:
        text = f"The table counts the paper's data; {model} runs on generated scenes unless --data names others."
    return Section("Plan", [Table(heads, lines, "What will be run.", left=2), Text(text)])
