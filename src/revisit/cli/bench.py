"""`revisit bench`: time methods against plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from revisit.cli import options

if TYPE_CHECKING:
    from revisit.decoding.method import Method


def bench(
    methods_: list[str] = typer.Option(
        ["revisit"],
        "--method",
        metavar="NAMES",
        help="Methods, separated by commas; settings as revisit:layers=all,alpha=1e-5.",
    ),
    model: str = options.MODEL,
    image: str = typer.Option(None, help="Image to describe; by default a plain gradient."),
    prompt: str = options.PROMPT,
    new_tokens: int = typer.Option(64, "--max-new-tokens", min=3, help="Tokens per call."),
    warmups: int = typer.Option(1, min=0, help="Warm-up calls."),
    repeats: int = typer.Option(3, min=1, help="Timed calls per method; methods alternate."),
    batch: int = typer.Option(1, "--batch-size", min=1, help="Rows per call."),
    beams: int = options.BEAMS,
    threads: int = typer.Option(None, min=1, help="CPU threads."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    as_json: bool = options.JSON,
) -> None:
    """Time methods against plain decoding: first token, ms per token.

    Examples:

      revisit bench --method revisit,vcd
      revisit bench --model path/to/model --method revisit:layers=all --threads 1
    """
    import torch
    from PIL.Image import linear_gradient

    from revisit import load, methods
    from revisit.eval.report.document import Section
    from revisit.eval.report.terminal import print_section
    from revisit.models.images import open_image
    from revisit.models.prompts import prepare
    from revisit.paper import latency
    from revisit.step.choice import usual_step

    wanted = methods.parse_methods(methods_)
    if threads is not None:
        torch.set_num_threads(threads)
    opened = open_image(image) if image is not None else linear_gradient("L").convert("RGB")
    loaded, processor = load(model, dtype=dtype, device_map=device_map)
    inputs = dict(prepare(processor, [prompt] * batch, [[opened]] * batch, loaded.device))
    plans: dict[str, Method] = {"greedy": methods.get("greedy")}
    for name, own in wanted:  # under the names that were typed
        label = ":".join([name, *([",".join(f"{key}={value}" for key, value in own.items())] if own else [])])
        plans[label] = methods.as_method(name, loaded, **own)
    timings = latency.measure(
        loaded, inputs, plans, new_tokens=new_tokens, repeats=repeats, warmups=warmups, num_beams=beams
    )
    rows = latency.table(timings)
    where = {
        "model": model,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "step": usual_step(loaded.device, loaded.dtype),  # after the calls: what could not be used is not named
        "new_tokens": new_tokens,
        "repeats": repeats,
        "batch": batch,
        "beams": beams,
    }
    if as_json:
        options.print_json({**where, "methods": rows})
        return
    about = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in where.items())
    caption = f"{about}. ms/token is mean ± deviation over calls; the ratio next to the lower quartile of all tokens is to greedy's."
    print_section(Section("Cost of methods", [latency.bench_table(rows, caption)]))
