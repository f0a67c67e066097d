"""Options, loading and output that several commands share."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from revisit.errors import RevisitError, printable
from revisit.io.records import Fields
from revisit.methods import parse_method
from revisit.models import DESCRIBE
from revisit.registry import MAX_BEAMS, MAX_SEED, Registry

if TYPE_CHECKING:
    from pathlib import Path

    from revisit.decoding.method import Method
    from revisit.guard.rates import Rate
    from revisit.models.types import Model, Processor
    from revisit.video.clip import Visual


def validate_seed(value: int) -> int:
    """Validate a seed here: a range on the option would print 19 digits in every help text."""
    if not 0 <= value <= MAX_SEED:
        raise typer.BadParameter(f"a seed is a number from 0 to 2^63 - 1, not {value}.")
    return value


def completion(registry: Registry[Any]) -> Callable[[str], list[str]]:
    """Complete the last of several comma-separated names."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in registry.names() if name.startswith(last)]

    return complete


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON, escaped if the encoding of standard output is not Unicode."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not unicode, indent=indent), flush=True)


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print names with their values, one per line."""
    rows = list(facts)
    width = max((len(name) for name, _ in rows), default=0)
    print(f"{title}\n")
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def chosen_method(text: str, assignments: list[str]) -> tuple[str, Fields]:
    """Return the name and the settings of a method, from `--method` and `--set`."""
    from revisit.registry import parse_assignments

    name, settings = parse_method(text)
    added = parse_assignments(assignments)
    if twice := [key for key, value in settings.items() if added.get(key, value) != value]:
        raise RevisitError(f"--method and --set give {', '.join(twice)} different values; remove one of them.")
    return name, settings | added


def load_for_image(model: str, image: Visual, name: str, *, any_image: bool, **options: Any) -> tuple[Model, Processor]:
    """Load a model for images like this one. `tiny` raises RevisitError for images unlike its scenes unless `any_image` is set."""
    from revisit.models.config import is_embedded
    from revisit.models.loading import load
    from revisit.video.clip import Video

    logging.getLogger("revisit.tiny").disabled = True  # its notice about unfamiliar images; they are checked here
    loaded, processor = load(model, **options)
    if is_embedded(model) and not any_image and not isinstance(image, Video):
        from revisit.embedded.familiar import check_scene

        check_scene(loaded, processor, image, name)
    return loaded, processor


def identity(model: str, **options: Any) -> Fields:
    """Return what identifies the answers of a model, without loading it."""
    from revisit import __version__
    from revisit.models.config import resolve
    from revisit.models.identity import fingerprint, model_folder

    return {"revisit": __version__, "model": model, "fingerprint": fingerprint(model_folder(resolve(model))), **options}


def print_failures(failures: Sequence[tuple[str, str]], most: int = 10) -> None:
    """List the first items that failed, with their reasons, on stderr."""
    for name, reason in failures[:most]:
        print(f"{printable(name)[-80:]}: {printable(reason)[:300]}", file=sys.stderr)
    if len(failures) > most:
        print(f"… and {len(failures) - most:,} more", file=sys.stderr)


def named(context: typer.Context, option: str) -> bool:
    """Return whether the user named an option, rather than leave it at its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


@dataclass
class PromisedCall:
    """A call of a command with `--risk`: what it decodes with, and its promise once the model is loaded."""

    rate: Rate
    method: str
    settings: dict[str, Any]
    prompt: str
    max_new_tokens: int
    plain: bool
    any_calibration: bool
    note: str = ""

    def check(self, model: Model, processor: Processor, method: Method) -> Method:
        """Return the method with its floor; raise RevisitError if the call differs from what was calibrated."""
        chosen, *_ = self.rate.settle(method, None, None)
        call = (model, processor, chosen, self.prompt, self.max_new_tokens)
        self.note = self.rate.checked(*call, plain=self.plain, any_calibration=self.any_calibration)
        print(self.note, file=sys.stderr)
        return chosen


def promised_call(
    context: typer.Context,
    risk: float | None,
    calibration: Path | None,
    any_calibration: bool,
    method: str,
    settings: dict[str, Any],
) -> PromisedCall | None:
    """Return the call of a command with `--risk`; what its options do not name comes from the calibration."""
    from revisit.guard.rates import GUARD, find_rate, no_risk
    from revisit.models.config import describe_model

    if risk is None:
        no_risk(calibration, any_calibration)
        return None
    given = context.params
    described = describe_model(given["model"], given["trust_remote_code"])
    rate = find_rate(described, risk, calibration)

    if not named(context, "method") and not settings:
        method, settings = rate.method, dict(rate.settings)
    settings = {key: rate.settings[key] for key in GUARD if key in rate.settings} | settings
    return PromisedCall(
        rate,
        method,
        settings,
        given["prompt"] if named(context, "prompt") else rate.prompt,
        given["max_new_tokens"] if named(context, "max_new_tokens") else rate.max_new_tokens,
        plain=not given["sample"] and given["beams"] == 1,
        any_calibration=any_calibration,
    )


RISK = typer.Option(None, min=0, max=1, help="Rate of mistakes that you accept, if `revisit calibrate` certified it.")
CALIBRATION = typer.Option(None, help="File of `revisit calibrate`; by default the model's own entry.")
ANY_CALIBRATION = typer.Option(
    False, "--any-calibration", help="Answer even where the calibration does not hold; no rate is promised then."
)
MODEL = typer.Option(
    "tiny",
    "--model",
    "-m",
    help="Local folder or Hub id. 'tiny' is a small model that ships with the package, 'photo' one for photographs.",
)
PROMPT = typer.Option(DESCRIBE, "--prompt", "-p", help="Question about the image.")
METHOD = typer.Option(
    "revisit", help="Decoding method (see `revisit methods`), with or without settings, as in revisit:alpha=1e-3."
)
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Setting of the method. Repeatable.")
SAMPLE = typer.Option(False, "--sample", help="Sample instead of decoding greedily.")
TEMPERATURE = typer.Option(1.0, help="Sampling temperature, with --sample.")
TOP_P = typer.Option(1.0, help="Probability mass of nucleus sampling, with --sample.")
BEAMS = typer.Option(1, min=1, max=MAX_BEAMS, help="Number of beams.")
HTML = typer.Option(None, help="Write a self-contained HTML page to this file.")
DTYPE = typer.Option(None, help="Data type: float32, float16, bfloat16 (or fp32, fp16, bf16) or auto.")
DEVICE_MAP = typer.Option(None, help="Device map for transformers, for example auto.")
TRUST_REMOTE_CODE = typer.Option(False, "--trust-remote-code", help="Run code from the model's repository.")
ALLOW_INCOMPLETE = typer.Option(
    False, "--allow-incomplete", help="Load weights with missing, unexpected or non-finite tensors."
)
FRAMES = typer.Option(None, help="How many frames to take from a video, evenly spaced; 8 by default.")
FPS = typer.Option(None, help="How many frames of a video to take per second, instead of --frames.")
ANY_IMAGE = typer.Option(False, "--any-image", help="Let 'tiny' process images unlike the scenes it was trained on.")
LENGTH = typer.Option(None, min=1, help="Maximum length of an answer, in tokens; by default the benchmark's.")
LIMIT = typer.Option(None, min=1, help="Use only this many items of each benchmark.")
BATCH_SIZE = typer.Option(8, min=1, help="Batch size; it does not change answers in float32.")
QUIET = typer.Option(False, "--quiet", "-q", help="Print only results, no progress.")
JSON = typer.Option(False, "--json", help="Print JSON.")
