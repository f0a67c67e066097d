"""`revisit ablate`: measure the effect of each ReVisiT setting."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.cli import options
from revisit.errors import need, unknown
from revisit.eval.config import EvalConfig
from revisit.eval.report.terminal import print_section
from revisit.registry import parse_assignments

PANELS = ("a", "b", "c", "d")


def ablate(
    context: typer.Context,
    panels: str = typer.Argument(
        "a,b,c,d",
        help="Panels, separated by commas: a (vocabulary × selection), b (layers × alpha), c (divergence), d (fusion × weight).",
    ),
    model: str = options.MODEL,
    benchmark: list[str] = typer.Option(["chair"], "--benchmark", "-b", help="Benchmarks, separated by commas."),
    data: list[str] = typer.Option(None, metavar="SOURCE", help="Data of the benchmarks, as for `revisit eval`."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Setting of the base configuration. Repeatable."
    ),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    max_new_tokens: int = options.LENGTH,
    out: Path = typer.Option(Path("ablation"), "--out", "-o", help="Folder for answers and results."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Run the paper's ablations of ReVisiT's settings; rerun the command to resume.

    The base configuration is ReVisiT with its defaults and the paper's layers for the model. To compare other settings, list
    them as methods of `revisit eval`.

    Examples:

      revisit ablate --data scenes:unusual:200 --out runs/ablation
      revisit ablate b --benchmark pope --set layers=all --out runs/alpha
    """
    names = [name.strip() for name in panels.split(",") if name.strip()]
    for name in names or [panels]:
        if name not in PANELS:
            raise unknown("panel", name, PANELS)
    arguments = {name: value for name, value in context.params.items() if name not in ("panels", "set_", "quiet")}
    config = EvalConfig(**arguments | {"data": tuple(data) if data else None, "out": str(out)})
    need(*config.packages())  # which also finds unknown benchmarks, before torch is imported

    from revisit.cli.progress import reporter
    from revisit.methods.revisit import ReVisiT
    from revisit.models.config import load_config
    from revisit.paper.ablation import ablate as run
    from revisit.paper.ablation import ablation_sections, paper_panels, read_panels

    base = ReVisiT.recommended(load_config(model).model_type).replace(**parse_assignments(set_))
    every = paper_panels(base)
    with reporter(quiet, out) as progress:
        logs = run(config, {name: every[name] for name in names}, base, progress)
    for section in ablation_sections(read_panels(out), logs, "ablation"):
        print_section(section)
    print(f"Stored in {out}; `revisit report {quote(str(out))}` shows the results.")
