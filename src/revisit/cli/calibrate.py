"""`revisit calibrate`: promise a rate of mistakes, or choose the settings of `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from revisit.cli import options
from revisit.errors import RevisitError, need, unknown
from revisit.guard.rates import Loss
from revisit.io.files import write_json

if TYPE_CHECKING:
    from revisit.calibration.calibrate import Price
    from revisit.eval.benchmarks.base import Item
    from revisit.models.types import Model, Processor


def calibrate(
    model: str = options.MODEL,
    data: str = typer.Option(
        ...,
        metavar="SOURCE",
        help="Images with known objects: what `revisit eval -b chair` takes, captions:FILE for your own, or scenes:SPLIT:NUMBER:SEED.",
    ),
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    risk: float = typer.Option(
        None, min=0.001, max=0.999, help="Rate of mistakes to promise; without it, the settings of `check` are chosen."
    ),
    confidence: float = typer.Option(0.9, min=0.5, max=0.9999, help="Probability that the promise holds."),
    loss: str = typer.Option(
        "caption",
        help="caption (one that names an absent object is a mistake) or share (of its objects that are absent).",
    ),
    bound: str = typer.Option(
        "floor",
        help="floor (names are withheld while decoding) or expectation (for filtering finished texts, with check).",
    ),
    prompt: str = options.PROMPT,
    max_new_tokens: int = typer.Option(256, min=1, help="Maximum length of an answer, in tokens."),
    words: Path = typer.Option(
        None, help="Names to withhold, one per line, then its synonyms; by default CHAIR's objects."
    ),
    out: Path = typer.Option(
        None, "--out", "-o", help="File for the result; by default the generation_config.json of the model's folder."
    ),
    limit: int = options.LIMIT,
    batch_size: int = options.BATCH_SIZE,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
    quiet: bool = options.QUIET,
) -> None:
    """Choose a floor that keeps the rate of mistakes below a promised one, on images with known objects; rerun to resume.

    Captions are decoded at one floor after the other, from the strictest down, as long as a test certifies the rate (learn then
    test). The promise is made over images like these, for objects of the list, before any change of model, method, prompt or length.
    It is not made for a single image, nor for each object.

    Exit status: 0 if the rate is certified, 1 if no floor reaches it, 2 for wrong input or too few images.

    Examples:

      revisit calibrate --model photo --data DIR --risk 0.3 --max-new-tokens 48 --out guard.json
      revisit generate photo.jpg --model photo --risk 0.3 --calibration guard.json
      revisit calibrate --model llava-hf/llava-1.5-7b-hf --data coco
    """
    if loss not in get_args(Loss):
        raise unknown("loss", loss, get_args(Loss))
    if bound not in ("floor", "expectation"):
        raise unknown("bound", bound, ("floor", "expectation"))
    if bound == "expectation" and (loss != "caption" or words is not None):
        raise RevisitError(
            "--bound expectation needs --loss caption and CHAIR's objects: leave out --loss and --words."
        )
    if out is None and not (Path(model) / "config.json").is_file():
        raise RevisitError(
            f"{model!r} is not a folder, so its generation_config.json cannot be changed: use --out FILE."
        )
    need("nltk", "scipy")
    from revisit.calibration.calibrate import Calibration, require_images
    from revisit.eval.benchmarks.language import require_data
    from revisit.guard.rates import ENTRY, add_entry

    items = _items(data, limit)
    if risk is not None:
        require_images(len(items), risk, confidence, loss, bound)  # type: ignore[arg-type]
        if words is None:
            require_data()
    name, settings = options.chosen_method(method, set_)
    settings |= {} if words is None else {"names": str(words)}
    from revisit import load
    from revisit.methods import as_method

    pair = load(
        model,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_incomplete=allow_incomplete,
    )
    if risk is None:
        settings = {"check": _check_entry(pair, items, batch_size, quiet)}
        if out is not None:
            write_json(out, settings)
        print(f"Wrote {out or add_entry(Path(model), settings)}")
        return
    chosen = as_method(name, pair[0], **settings)
    if chosen.floor:
        raise RevisitError("The calibration chooses the floor: leave out floor.")

    from revisit.cli.progress import progress_bar

    with progress_bar() as bar:
        task = bar.add_task("captions", total=None, visible=not quiet)
        run = Calibration(
            *pair,
            items,
            chosen,
            risk,
            confidence,
            loss,  # type: ignore[arg-type]
            prompt,
            max_new_tokens,
            batch_size,
            show=lambda price: _print_price(price, len(items)),
            advance=lambda count: bar.advance(task, count),
        )
        rate, best = run.run_floor() if bound == "floor" else (run.run_filter(), None)
    if rate is None:
        reached = "" if best is None else f" The strictest floor certifies {best:.3f}."
        print(f"A risk of {risk:g} could not be certified on these images.{reached}")
        raise typer.Exit(1)
    what = "floor" if rate.bound == "floor" else "threshold"
    print(f"{rate.promise()} {what} {rate.threshold:g}, {rate.mistakes:g} mistakes in {rate.images} images.")
    entry = rate.model_dump(mode="json")
    if out is not None:
        write_json(out, entry)
    print(f"Wrote {out or add_entry(Path(model), {ENTRY: entry})}")


def _items(data: str, limit: int | None) -> list[Item]:
    """Return the images that can be read, with their objects; the others are listed on stderr."""
    from revisit.eval.benchmarks.chair import Chair
    from revisit.eval.benchmarks.io.places import resolve_data
    from revisit.eval.benchmarks.own import OwnCaptions
    from revisit.eval.run import read_source

    kind, _, file = data.partition(":")
    if kind == OwnCaptions.name:
        own = OwnCaptions(file=file)
        folder = Path(own.default_data)
        items = own.load(folder)[:limit]
    else:
        folder = resolve_data(data, "chair", None)
        items = Chair().load(folder)[:limit]
    problems = {item.id: item.error or read_source(folder, (item.images[0], item.sampling)).problem for item in items}
    if len(problems) < len(items):
        raise RevisitError(f"Two images of {data} have the same id: give each its own.")
    options.print_failures([(id, problem) for id, problem in problems.items() if problem])
    return [item for item in items if not problems[item.id]]


def _print_price(price: Price, images: int) -> None:
    """Print the mistakes and the price of one floor."""
    where = f"floor {price.floor:g}" if price.floor else f"without a floor, {images} images"
    print(
        f"{where}: mistakes {price.risk:.1%}, recall {price.recall:.1%}, {price.words:.1f} words, {price.decoded} captions decoded",
        flush=True,
    )


def _check_entry(pair: tuple[Model, Processor], items: list[Item], batch_size: int, quiet: bool) -> dict[str, Any]:
    """Measure how well a model can check, and return the entry for its generation_config.json."""
    from revisit.cli.progress import counted
    from revisit.explain.calibration import calibrate as measure

    with counted("images", len(items), quiet) as advance:
        measured = measure(
            *pair,
            [item.images[0] for item in items],
            [set(item.meta["ground_truth"]) for item in items],
            batch_size=batch_size,
            advance=lambda count: advance(count, 0),
        )
    print(
        f"Measured on {measured.words} object words in captions by the model; {measured.absent} of these objects are absent."
    )
    entry = {"layer": measured.layer, "threshold": round(measured.threshold, 3), "auroc": round(measured.auroc, 3)}
    options.print_json({"check": entry})
    return entry
