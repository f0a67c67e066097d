"""Options and output that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import typer

from revisit.errors import RevisitError
from revisit.models import DESCRIBE
from revisit.registry import MAX_BEAMS, MAX_SEED


def a_seed(value: int) -> int:
    """Return a valid seed; a range on the option would print 19 digits in every help text."""
    if not 0 <= value <= MAX_SEED:
        raise typer.BadParameter(f"{value} is not in the range 0<=x<={MAX_SEED}.")
    return value


def completion(names: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Complete the last of several comma-separated names."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last)]

    return complete


def _methods() -> list[str]:
    from revisit.decoding.method import METHODS

    return METHODS.names()


def _benchmarks() -> list[str]:
    from revisit.eval.benchmarks import names

    return names()


complete_methods, complete_benchmarks = completion(_methods), completion(_benchmarks)


def typed(context: typer.Context, name: str) -> bool:
    """Return whether the user gave this option. typer may have its own copy of click, so sources are compared by name."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON that the encoding of standard output can hold."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not unicode, indent=indent), flush=True)


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print names with their values, one per line."""
    print(f"{title}\n")
    for name, value in facts:
        print(f"{name}: {value}")


def chosen_method(text: str, assignments: list[str]) -> tuple[str, dict[str, Any]]:
    """Return a method's name and settings, from its text and from `--set`."""
    from revisit.methods import parse_method
    from revisit.registry import parse_assignments

    name, own = parse_method(text)
    settings = {**own, **parse_assignments(assignments)}
    if twice := [key for key, value in own.items() if settings[key] != value]:
        raise RevisitError(f"--method and --set give {', '.join(twice)} different values; remove one of them.")
    return name, settings


MODEL = typer.Option(
    "tiny", "--model", "-m", help="Local folder or Hub id. 'tiny' is the small model that ships with the package."
)
PROMPT = typer.Option(DESCRIBE, "--prompt", "-p", help="The question.")
METHOD = typer.Option("revisit", help="Decoding method, see `revisit methods`. Settings: --set, or revisit:alpha=1e-3.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Setting of the method. Repeatable.")
COMPARE_WITH = typer.Option(["greedy"], help="Another method to compare with, or none. Repeatable.")
MAX_NEW_TOKENS = typer.Option(256, min=1, help="Maximum length of an answer, in tokens.")
SAMPLE = typer.Option(False, "--sample", help="Sample instead of decoding greedily.")
TEMPERATURE = typer.Option(1.0, help="Temperature, with --sample.")
TOP_P = typer.Option(1.0, help="Nucleus size, with --sample.")
BEAMS = typer.Option(1, min=1, max=MAX_BEAMS, help="Number of beams.")
HTML = typer.Option(None, help="Write a self-contained HTML page.")
DTYPE = typer.Option(None, help="float32, float16, bfloat16 (or fp32, fp16, bf16) or auto.")
DEVICE_MAP = typer.Option(None, help="Passed to transformers, for example auto.")
TRUST_REMOTE_CODE = typer.Option(False, "--trust-remote-code", help="Allow code from the model's repository.")
ALLOW_INCOMPLETE = typer.Option(
    False, "--allow-incomplete", help="Load weights with missing, unexpected or non-finite tensors."
)
ANY_IMAGE = typer.Option(False, "--any-image", help="Let `tiny` process images unlike the scenes it was trained on.")
LIMIT = typer.Option(None, min=1, help="Use only the first items of each benchmark.")
BATCH_SIZE = typer.Option(8, min=1, help="Batch size. Does not change answers in float32.")
PLAN = typer.Option(False, "--plan", help="Print the plan and exit.")
QUIET = typer.Option(False, "--quiet", "-q", help="Print results only, no progress.")
JSON = typer.Option(False, "--json", help="Print JSON.")
