"""`revisit score`: score a file of answers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks.base import check_answers
from revisit.eval.benchmarks.io.places import resolve_data
from revisit.registry import parse_assignments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from revisit.eval.benchmarks.base import Item
    from revisit.io.records import AnswerRow


def score(
    benchmark: str = typer.Argument(..., help="Name of a benchmark (see `revisit benchmarks`), or FILE.py:Class."),
    answers: Path = typer.Argument(..., help="File of answers, or a log of `revisit eval`."),
    data: str = typer.Option(..., metavar="SOURCE", help="Data of the benchmark, as for `revisit eval`."),
    field: str = typer.Option(
        None, help="Field of the file that contains the answer, if there are several candidates."
    ),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Option of the benchmark. Repeatable."),
    subset: bool = typer.Option(False, "--subset", help="Score only the items that were answered."),
    as_json: bool = typer.Option(False, "--json", help="Print every metric, unrounded, as one JSON object."),
) -> None:
    """Score a file of answers; no model is needed.

    Examples:

      revisit score chair captions.jsonl --data data/coco --json
      revisit score pope answers.jsonl --data data/pope --set parser=vcd --set settings=coco_random
      revisit score vqav2 results.json --data data/vqav2 --field answer
      revisit score mmmu total_val_output.json --data data/mmmu
    """
    from revisit.io.records import read_answers

    chosen = get(benchmark, **parse_assignments(set_))
    rows, notes = read_answers(answers, field), list[str]()
    try:
        items = chosen.load(resolve_data(data, chosen.name))
        if wrong := next((item for item in items if item.error), None):
            raise RevisitError(wrong.error)
        texts = attach(rows, items, chosen.answer_id)
        if subset:
            answered = [item for item in items if item.id in texts]
            if not len(answered) == len(items) == len(texts):
                extra = len(texts) - len(answered)
                unknown = f" {extra} answers match no item." if extra else ""
                notes.append(f"Scored the {len(answered)} answered of {len(items)} items.{unknown}")
            items, texts = answered, {item.id: texts[item.id] for item in answered}
        check_answers(items, texts)
        scores = chosen.score(items, texts)
    except RevisitError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RevisitError(
            f"{answers} cannot be scored as {chosen.name} with the data in {data} ({type(error).__name__}: {error}); compare both "
            "with the layouts in docs/benchmarks.md."
        ) from error
    notes += scores.notes
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in scores.metrics.items()}
        result = {
            "benchmark": chosen.name,
            "version": chosen.version,
            "items": len(items),
            "metrics": finite,
            "counts": {k: None if math.isnan(v) else int(v) if v == int(v) else v for k, v in scores.counts.items()},
            "notes": notes,
        }
        options.print_json(result, indent=2)
        return
    print(f"{chosen.name} ({chosen.version}), {len(items)} items")
    width = max(map(len, scores.metrics))
    for name, value in scores.metrics.items():
        print(f"  {name:<{width}}  {chosen.metric(name).text(value):>8}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def attach(
    answers: Sequence[AnswerRow], items: Sequence[Item], key: Callable[[AnswerRow], str | None]
) -> dict[str, str]:
    """Return item id -> text, by the ids of the rows, or by position if no row has an id. Unknown ids are kept.

    The id "17" means the item "coco_random/17" if the last parts of all item ids differ.
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
    by_item: dict[str, AnswerRow] = {}
    for name, answer in zip(keys, answers, strict=True):
        name = answer.need() if name is None else name
        name = short.get(name, name)
        if name in by_item:
            raise RevisitError(f"{answer.where} answers {name!r} a second time (first at {by_item[name].where}).")
        by_item[name] = answer
    return {name: answer.text for name, answer in by_item.items()}
