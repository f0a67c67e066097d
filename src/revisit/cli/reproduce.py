"""`revisit reproduce`: measure the paper's tables and figures again."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options
from revisit.errors import RevisitError, need, unknown
from revisit.eval.benchmarks.io.places import DOWNLOAD, parse_data
from revisit.eval.report.document import Section, Table, write
from revisit.eval.report.terminal import print_section
from revisit.io.files import make_folder
from revisit.models.config import EMBEDDED
from revisit.paper import published
from revisit.paper.published import MODELS, ROWS, Exhibit

SCENES = "scenes:unusual:8"  # default data of the embedded model


def reproduce(
    table: str = typer.Argument("", help="Tables, separated by commas, or all; --list shows their names."),
    list_: bool = typer.Option(False, "--list", help="List the tables and figures with the models and data they need."),
    plan: bool = typer.Option(False, "--plan", help="Print the plan and exit."),
    models: str = typer.Option(
        None, help="Use only these models of the paper, separated by commas; NAME=FOLDER loads one from a folder."
    ),
    model: str = typer.Option(None, "--model", "-m", help="Use this model instead of the paper's, for example tiny."),
    data: list[str] = typer.Option(
        None,
        metavar="SOURCE",
        help="Data, as for `revisit eval`; by default 'download', or generated scenes for 'tiny'.",
    ),
    out: Path = typer.Option(Path("reproduced"), "--out", "-o", help="Folder for answers, results and report.html."),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    engine: str = typer.Option(
        "local", help="Engine of the benchmarks: local, ray or vllm. Studies always run locally."
    ),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Reproduce the paper's tables and figures; rerun the command to resume.

    The report shows the measured numbers next to the published ones.

    Examples:

      revisit reproduce --list
      revisit reproduce chair --models LLaVA-1.5-7B --plan
      revisit reproduce all --model tiny --out runs/tiny
    """
    if list_:
        print_section(_listing())
        return
    if models is not None and model is not None:
        raise RevisitError("--models selects models of the paper and --model replaces them: use one of the two.")
    rows = published.find(table)
    chosen = dict.fromkeys(published.MODELS, model) if model is not None else _models(models)
    print_section(_plan(rows, chosen, model is not None, limit))
    if plan:
        return
    from revisit.cli.progress import reporter
    from revisit.eval.benchmarks.language import require_data
    from revisit.paper.reproduce import Setup
    from revisit.paper.reproduce import reproduce as run

    need("scipy", "statsmodels", "matplotlib")
    benchmarks = list(dict.fromkeys(row.benchmark for row in rows))
    if "chair" in benchmarks:
        require_data()
    setup = Setup(
        out=make_folder(out),
        models=chosen,
        data=parse_data(data or (SCENES if model == EMBEDDED else DOWNLOAD), benchmarks),
        stand_in=model is not None,
        limit=limit,
        batch_size=batch_size,
        options={"engine": engine, "dtype": dtype, "device_map": device_map},
    )
    with reporter(quiet, out / "runs") as progress:
        document = run(rows, setup, progress)
    files = write(document, out)
    print(f"Wrote {files[0]}, {files[1]} and {len(document.figures())} figures.")


def _models(names: str | None) -> dict[str, str]:
    """Return the folder or Hub id of each model, by its name in the paper."""
    if names is None:
        return {name: model.hub for name, model in MODELS.items()}
    chosen = {}
    for entry in filter(None, (part.strip() for part in names.split(","))):
        name, _, folder = entry.partition("=")
        if name not in MODELS:
            raise unknown("model of the paper", name, MODELS)
        chosen[name] = folder or MODELS[name].hub
    if not chosen:
        raise RevisitError(f"--models names no model; the models of the paper are {', '.join(MODELS)}.")
    return chosen


def _listing() -> Section:
    lines = [
        (row.key, row.where, row.title, ", ".join(row.models), row.benchmark, f"{row.items:,}", row.data)
        for row in ROWS.values()
    ]
    heads = ("Name", "In the paper", "What", "Models", "Benchmark", "Items", "Data")
    return Section(
        "The paper's tables and figures", [Table(heads, lines, "Run one with `revisit reproduce NAME`.", left=5)]
    )


def _plan(rows: list[Exhibit], chosen: dict[str, str], stand_in: bool, limit: int | None) -> Section:
    lines = []
    for row in rows:
        answers = f"{min(row.items, limit or row.items) * row.answers:,}"
        for name in [name for name in row.models if name in chosen][: 1 if stand_in else None]:
            download = "–" if stand_in else f"{2 * MODELS[name].billions:.0f} GB"
            lines.append((row.key, chosen[name], download, answers))
    caption = "The work with the paper's data; rows of one benchmark share their answers."
    return Section("Plan", [Table(("Table", "Model", "Download", "Answers"), lines, caption, left=2)])
