"""`revisit score`: score answers on disk, without a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from revisit.eval.benchmarks.base import Benchmark, Item, Scores
    from revisit.explain.records import AnswerRow


def score(
    benchmark: str = typer.Argument(..., help="A name from `revisit benchmarks`, or FILE.py:Class."),
    answers: Path = typer.Argument(..., help="A file of answers, or a log of `revisit eval`."),
    data: str = typer.Option(..., help="The benchmark's data, as for `revisit eval`."),
    field: str = typer.Option(None, help="Field with the generated text, if ambiguous."),
    set_: list[str] = typer.Option([], "--set", help="Option of the benchmark, key=value."),
    subset: bool = typer.Option(False, "--subset", help="Score only the items that were answered."),
    as_json: bool = typer.Option(False, "--json", help="Print every metric, unrounded, as one JSON object."),
) -> None:
    """Score a file of answers, without a model.

    Examples:

      revisit score chair captions.jsonl --data data/coco --json

      revisit score pope answers.jsonl --data data/pope --set parser=vcd --set settings=coco_random

      revisit score vqav2 results.json --data data/vqav2 --field answer

      revisit score mmmu total_val_output.json --data data/mmmu
    """
    from revisit.eval.benchmarks import get
    from revisit.eval.benchmarks.base import check_answers
    from revisit.eval.benchmarks.io.places import resolve_data
    from revisit.explain.records import read_answers
    from revisit.registry import parse_assignments

    chosen = get(benchmark, **parse_assignments(set_))
    found = read_answers(answers, field)
    try:
        items = chosen.load(resolve_data(data, chosen.name))
        texts = attach(found, items, chosen.answer_id)
        notes: tuple[str, ...] = ()
        if subset:
            items, texts, notes = _common(items, texts)
        check_answers(items, texts)
        scores = chosen.score(items, texts)
    except RevisitError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RevisitError(
            f"{answers} cannot be scored as {chosen.name} with the data in {data} ({type(error).__name__}: {error}); compare both "
            "with the layouts in docs/benchmarks.md."
        ) from error
    if as_json:
        typer.echo(_json(chosen, scores, len(items), notes))
    else:
        _table(chosen, scores, len(items), notes)


def attach(
    answers: Sequence[AnswerRow], items: Sequence[Item], key: Callable[[AnswerRow], str | None]
) -> dict[str, str]:
    """Return item id -> text, by the rows' ids, or by position if no row has an id. Ids that match no item are kept.

    An item called "coco_random/17" may be named "17" if no other item is.
    """
    keys = [key(answer) for answer in answers]
    if all(name is None for name in keys):
        if len(answers) != len(items):
            raise RevisitError(
                f"The answers have no ids, so they must be in the order of the {len(items)} items, but there are {len(answers)}."
            )
        keys = [item.id for item in items]
    short = {item.id.rpartition("/")[2]: item.id for item in items}
    if len(short) < len(items):
        short = {}
    found: dict[str, AnswerRow] = {}
    for name, answer in zip(keys, answers, strict=True):
        name = answer.need() if name is None else name
        name = short.get(name, name)
        if name in found:
            raise RevisitError(f"{answer.where} answers {name!r} a second time (first at {found[name].where}).")
        found[name] = answer
    return {name: answer.text for name, answer in found.items()}


def _common(items: list[Item], texts: dict[str, str]) -> tuple[list[Item], dict[str, str], tuple[str, ...]]:
    """The items that have an answer, their answers, and a note if something was left out."""
    kept = [item for item in items if item.id in texts]
    own = {item.id: texts[item.id] for item in kept}
    if len(own) == len(items) == len(texts):
        return kept, own, ()
    extra = f" {len(texts) - len(own)} answers match no item." if len(texts) > len(own) else ""
    return kept, own, (f"Scored the {len(kept)} answered of {len(items)} items.{extra}",)


def _json(benchmark: Benchmark, scores: Scores, items: int, notes: tuple[str, ...]) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in scores.metrics.items()}
    result = {
        "benchmark": benchmark.name,
        "version": benchmark.version,
        "items": items,
        "metrics": finite,
        "counts": {k: None if math.isnan(v) else int(v) if v == int(v) else v for k, v in scores.counts.items()},
        "notes": [*notes, *scores.notes],
    }
    return json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)


def _table(benchmark: Benchmark, scores: Scores, items: int, notes: tuple[str, ...]) -> None:
    typer.echo(f"{benchmark.name} ({benchmark.version}), {items} items")
    width = max(map(len, scores.metrics))
    for name, value in scores.metrics.items():
        typer.echo(f"  {name:<{width}}  {benchmark.metric(name).text(value):>8}")
    for note in (*notes, *scores.notes):
        typer.echo(f"note: {note}", err=True)
