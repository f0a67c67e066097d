"""`revisit bench`: measure the speed of methods."""

from __future__ import annotations

import sys

import typer

from revisit import methods
from revisit.cli import options
from revisit.decoding.method import Method
from revisit.errors import unknown
from revisit.eval.report.document import Section
from revisit.eval.report.terminal import print_section


def bench(
    methods_: list[str] = typer.Option(
        ["revisit"],
        "--method",
        metavar="NAMES",
        help="Methods, separated by commas; one with settings, as in revisit:layers=all, needs its own --method.",
    ),
    model: str = options.MODEL,
    image: str = typer.Option(None, help="Image file; by default a gray gradient."),
    prompt: str = options.PROMPT,
    new_tokens: int = typer.Option(64, "--max-new-tokens", min=3, help="Number of tokens per call."),
    warmups: int = typer.Option(1, min=0, help="Number of warm-up calls per method."),
    repeats: int = typer.Option(3, min=1, help="Number of timed calls per method; methods alternate."),
    batch: int = typer.Option(1, "--batch-size", min=1, help="Batch size."),
    beams: int = options.BEAMS,
    threads: int = typer.Option(None, min=1, help="Number of CPU threads."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    as_json: bool = options.JSON,
) -> None:
    """Measure the time to the first token and per token, compared with plain decoding.

    Examples:

      revisit bench --method revisit,vcd
      revisit bench --model path/to/model --method revisit:layers=all --threads 1
    """
    from PIL.Image import linear_gradient

    from revisit.io.images import open_image

    compared = methods.parse_methods(methods_)
    for name, _ in compared:
        if name not in methods.names():
            raise unknown("method", name, methods.names())
    opened = open_image(image) if image is not None else linear_gradient("L").convert("RGB")

    for name, settings in compared:  # after the other checks, because it imports torch, which takes seconds
        methods.get(name, **settings)

    import torch

    from revisit import load
    from revisit.models.prompts import prepare
    from revisit.paper import latency
    from revisit.step.choice import usual_step

    if threads is not None:
        torch.set_num_threads(threads)
    loaded, processor = load(model, dtype=dtype, device_map=device_map)
    inputs = dict(prepare(processor, [prompt] * batch, [[opened]] * batch, device=loaded.device))
    plans: dict[str, Method] = {"greedy": methods.get("greedy")}
    for name, settings in compared:  # labeled as on the command line
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        plans[f"{name}:{text}" if text else name] = methods.as_method(name, loaded, **settings)
    timings = latency.measure(
        loaded, inputs, plans, new_tokens=new_tokens, repeats=repeats, warmups=warmups, num_beams=beams
    )
    rows = latency.table(timings)
    conditions = {
        "model": model,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "step": usual_step(loaded.device, loaded.dtype),  # after the calls, so that a failed backend is not named
        "new_tokens": new_tokens,
        "repeats": repeats,
        "batch": batch,
        "beams": beams,
    }
    if warning := latency.busy_warning(rows):
        print(warning, file=sys.stderr)
    if as_json:
        options.print_json({**conditions, "methods": rows})
        return
    shown = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in conditions.items())
    caption = (
        f"{shown}. Times are medians over calls, ± the largest difference of a call; the ratio next to the lower quartile of all tokens "
        "is to greedy's."
    )
    print_section(Section("Cost of methods", [latency.bench_table(rows, caption)]))
