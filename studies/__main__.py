"""Run a study, print its tables and store its numbers: `python -m studies --help`, from the root of a clone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from revisit.cli import options
from revisit.cli.main import main
from revisit.cli.progress import reporter
from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks.io.places import DEFAULT_SCENES
from revisit.eval.report.document import Figure, Section
from revisit.eval.report.terminal import print_section
from revisit.eval.spec import environment
from revisit.io.files import make_folder, slug, write_json
from revisit.paper.study import CAPTIONS, Subject, command
from studies import check, decay, floors, pointing, rendered, times, word_labels

STUDIES = {
    "check": check,
    "floors": floors,
    "grounding-decay": decay,
    "pointing": pointing,
    "rendered-text": rendered,
    "times": times,
    "word-labels": word_labels,
}
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def study(
    name: str = typer.Argument(help=f"One of: {', '.join(STUDIES)}."),
    model: str = options.MODEL,
    data: str = typer.Option(DEFAULT_SCENES, help="Folder of COCO val2014, or scenes:SPLIT:NUMBER:SEED."),
    limit: int = typer.Option(None, min=1, help="Use only this many images."),
    out: Path = typer.Option(Path("results"), "--out", "-o", help="Folder for captions and results."),
    method: list[str] = typer.Option(
        None,
        help="Method of the captions; by default greedy. For pointing and times: the methods to compare. Repeatable.",
    ),
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum length of a caption, in tokens."),
    batch_size: int = typer.Option(8, min=1, help="Batch size."),
    writer: str = typer.Option(None, help="For check: model that writes the captions; by default --model."),
    labels: Path = typer.Option(None, help="For word-labels: a file of DetailVerifyBench or HalLoc."),
    calibrated: Path = typer.Option(
        None, help="For floors: the result of another run, whose images calibrate instead."
    ),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Run one of the studies that docs/research/studies.md describes."""
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    if name == "word-labels" and labels is None:
        raise RevisitError("word-labels needs --labels FILE, and --data with the folder of its images.")
    subject = Subject(
        model=model,
        data=data,
        limit=limit,
        out=str(make_folder(out)),
        method=tuple(method or getattr(STUDIES[name], "METHODS", ("greedy",))),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device_map=device_map,
    )
    special: dict[str, dict[str, Any]] = {"check": {"writer": writer}, "word-labels": {"labels": labels}}
    special["floors"] = {"calibrated": calibrated}
    with reporter(quiet, out / CAPTIONS) as progress:
        result = STUDIES[name].run(subject, progress, **special.get(name, {}))
    path = out / f"{name}-{slug(model)}-{slug(data)}.json"
    about = {"command": command(), "settings": subject.settings(), "environment": environment()}
    write_json(path, {"study": name, **about, "result": result})
    blocks = STUDIES[name].draw(result)
    for block in blocks:
        if isinstance(block, Figure):
            (out / f"{block.name}.svg").write_text(block.svg, encoding="utf-8")
    print_section(Section(f"{name} · {model} · {data}", blocks))
    print(f"Stored in {path}.")


if __name__ == "__main__":
    main(app)
