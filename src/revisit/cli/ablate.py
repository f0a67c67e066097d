"""`revisit ablate`: the effect of each ReVisiT setting, on any benchmark."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.cli import options
from revisit.errors import need, unknown


def ablate(
    panels: str = typer.Argument(
        "a,b,c,d",
        help="Panels of the paper, separated by commas: a vocabulary × selection, b layers × alpha, c divergence, d fusion × weight.",
    ),
    model: str = options.MODEL,
    benchmark: list[str] = typer.Option(["chair"], "--benchmark", "-b", help="Benchmarks, separated by commas."),
    data: list[str] = typer.Option(
        None, help="As for `revisit eval`: a folder, NAME=FOLDER, or scenes:SPLIT:NUMBER:SEED."
    ),
    set_: list[str] = typer.Option([], "--set", help="Setting of the base configuration, key=value. Repeatable."),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    max_new_tokens: int = typer.Option(
        None, min=1, help="Maximum length of an answer; by default the benchmark's own."
    ),
    out: Path = typer.Option(Path("ablation"), "--out", "-o", help="Folder for answers and results."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Run the paper's ablations; a stopped run resumes with the same command.

    The base configuration is ReVisiT with its defaults and the paper's layers for the model. To compare other settings, list
    them as methods of `revisit eval`.

    Examples:

      revisit ablate --data scenes:unusual:200 --out runs/ablation

      revisit ablate b --benchmark pope --set layers=all --out runs/alpha
    """
    from revisit.cli.progress import reporter
    from revisit.eval.config import EvalConfig
    from revisit.eval.report.terminal import print_section
    from revisit.methods.revisit import ReVisiT
    from revisit.models.config import load_config
    from revisit.paper.ablation import ablate as run
    from revisit.paper.ablation import ablation_sections, paper_panels, read_panels
    from revisit.registry import parse_assignments

    base = ReVisiT.recommended(load_config(model).model_type).replace(**parse_assignments(set_))
    every, names = paper_panels(base), [name.strip() for name in panels.split(",") if name.strip()]
    for name in names:
        if name not in every:
            raise unknown("panel", name, every)
    settings = EvalConfig(
        model=model,
        benchmark=tuple(benchmark),
        data=tuple(data) if data else None,
        limit=limit,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        out=str(out),
        dtype=dtype,
        device_map=device_map,
    )
    need(*settings.packages())
    with reporter(quiet, out) as progress:
        logs = run(settings, {name: every[name] for name in names}, base, progress)
    for section in ablation_sections(read_panels(out), logs, "ablation"):
        print_section(section)
    print(f"Stored in {out}; `revisit report {quote(str(out))}` shows the results.")
