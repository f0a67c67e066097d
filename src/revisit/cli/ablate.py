"""`revisit ablate`: what each setting of ReVisiT is worth, on any benchmark."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import typer

from revisit.cli import options
from revisit.cli.eval import stopped, typed
from revisit.cli.progress import reporter
from revisit.errors import RevisitError, need, unknown


def ablate(
    context: typer.Context,
    panels: str = typer.Argument(
        "a,b,c,d",
        help="Panels of the paper, separated by commas: a vocabulary × selection, b layers × alpha, c divergence, d fusion × weight.",
    ),
    model: list[str] = typer.Option(["tiny"], "--model", "-m", help="Local folders or hub ids, separated by commas."),
    benchmark: list[str] = typer.Option(["chair"], "--benchmark", "-b", help="Benchmarks, separated by commas."),
    data: list[str] = typer.Option(
        None, help="As for `revisit eval`: a folder, NAME=FOLDER, or scenes:SPLIT:NUMBER:SEED."
    ),
    set_: list[str] = typer.Option(
        [], "--set", help="A setting of the main configuration, key=value; may be repeated."
    ),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    max_new_tokens: int = typer.Option(None, min=1, help="Longest answer; each benchmark's own if not given."),
    out: Path = typer.Option(Path("ablation"), "--out", "-o", help="Where answers and results are kept."),
    config: Path = typer.Option(
        None, "--config", "-c", help="YAML file with `panels` of your own; see docs/studies.md."
    ),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Run the paper's ablation panels, or a grid of your own; a stopped or killed run resumes with the same command.

    The prompt of an item is run once for all settings. The main configuration is ReVisiT with its defaults and the
    layers that the paper recommends for the model.

    Examples:

      revisit ablate --data scenes:unusual:200 --out runs/ablation

      revisit ablate b --benchmark pope --set layers=all --out runs/alpha

      revisit ablate --config grid.yaml
    """
    from revisit.evaluation.config import EvalConfig, merge, read_yaml
    from revisit.evaluation.store import read_results
    from revisit.paper.ablation import ablate as run
    from revisit.paper.ablation import all_methods, paper_panels, read_ablation, yaml_panels
    from revisit.paper.sections import ablation_sections
    from revisit.paper.study import command
    from revisit.report.terminal import print_section

    flags: dict[str, Any] = {
        "model": model,
        "benchmark": benchmark,
        "data": data,
        "limit": limit,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "out": str(out),
        "dtype": dtype,
        "device_map": device_map,
    }
    own = dict(read_yaml(config)) if config else {}
    described, own_base = own.pop("panels", None), own.pop("base", {})
    if config and described is None:
        raise RevisitError(f"{config} has no `panels`; `revisit eval --config` runs a file without.")
    known = [key for key in EvalConfig.model_fields if key != "method"]
    for key in own:
        if key not in known:
            raise unknown(f"key in {config}:", str(key), ["panels", "base", *known])
    in_file = EvalConfig.read(own, str(config))
    base = _base(
        own_base, str(config), set_, in_file.model if "model" in own and not typed(context, "model") else model
    )
    if described is not None:
        chosen = yaml_panels(described, base, str(config))
        flags = {name: value for name, value in flags.items() if typed(context, name) or name not in own}
    else:
        every = paper_panels(base)
        names = [name.strip() for name in panels.split(",") if name.strip()]
        for name in names:
            if name not in every:
                if Path(name).suffix.lower() in (".yaml", ".yml") or Path(name).is_file():
                    raise RevisitError(f"There is no panel {name!r}: did you mean --config {quote(name)}?")
                raise unknown("panel", name, every)
        chosen = {name: every[name] for name in names}
    settings = merge(own, {key: value for key, value in flags.items() if value is not None}, str(config))
    need(*settings.packages())
    plan = _with_methods(settings, all_methods(chosen))
    try:
        with reporter(quiet) as progress:
            run(plan, chosen, progress, command())
    except KeyboardInterrupt:
        raise stopped(plan.output) from None
    about, results = read_ablation(plan.output), read_results(plan.output)
    for section in ablation_sections(about, results, "ablation"):
        print_section(section)
    print(f"Stored in {plan.output}; `revisit report {quote(str(plan.output))}` draws it.")


def _base(given: Any, where: str, assignments: list[str], model: Any) -> Any:
    """The main configuration: the paper's layers for the model, then the file's base, then --set."""
    from revisit.methods.revisit import ReVisiT
    from revisit.models.loading import load_config
    from revisit.registry import parse_assignments

    if not isinstance(given, dict):
        raise RevisitError(f"{where}: `base` must map settings to values, such as {{layers: all}}, not {given!r}.")
    try:
        own = {str(key): value for key, value in given.items()}
        ReVisiT(**own)
    except RevisitError as error:
        raise RevisitError(f"{where}, `base`: {error}") from error
    settings = {**own, **parse_assignments(assignments)}
    names = (model if isinstance(model, str) else ",".join(map(str, model))).split(",")
    if "layers" in settings:
        return ReVisiT(**settings)
    wanted = [ReVisiT.recommended(load_config(name.strip()).model_type) for name in names]
    if len({method.layers for method in wanted}) > 1:
        raise RevisitError(
            "The paper recommends other layers for some of these models: ablate them apart, or --set layers."
        )
    return wanted[0].replace(**settings)


def _with_methods(settings: Any, methods: Any) -> Any:
    """The plan of `revisit eval` with these methods in place of named ones."""
    import dataclasses

    plan = settings.replace(method=("greedy",)).plan()
    return dataclasses.replace(plan, methods=methods, tuned={})


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(ablate)
