"""`revisit score`: numbers from answers that are already on disk, without a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from revisit.benchmarks.base import Benchmark, Item, Scores


def score(
    benchmark: str = typer.Argument(..., help="A name from `revisit benchmarks`, or FILE.py:Class."),
    answers: Path = typer.Argument(..., help="Answers: ours or other people's; see the documentation of benchmarks."),
    as_json: bool = typer.Option(False, "--json", help="Print every metric, unrounded, as one JSON object."),
    per_item: bool = typer.Option(False, "--per-item", help="With --json: what each item contributes to each metric."),
    data: Path = typer.Option(None, help="Data folder as for `revisit eval`, to score our own answers against."),
    ground_truth: list[Path] = typer.Option([], help="CHAIR: image id -> category names, or COCO annotation files."),
    questions: list[Path] = typer.Option(
        [], help="POPE, HallusionBench, ...: the file with questions and labels; may be repeated."
    ),
    annotations: list[Path] = typer.Option([], help="VQAv2, AMBER: the official annotations, or AMBER's folder."),
    gold: list[Path] = typer.Option([], "--answers", help="MMMU: answer_dict_val.json, or questions with options."),
    parser: str = typer.Option(None, help="POPE: official, vcd, opera, harness, vlmevalkit or repope."),
    judge: str = typer.Option(None, help="HallusionBench, LLaVA-Bench: rule, labels or model."),
    judge_url: str = typer.Option(None, help="Base address of an OpenAI-compatible API; implies --judge model."),
    judge_model: str = typer.Option(None, help="The judge's model."),
    judge_cache: Path = typer.Option(None, help="JSON-lines file that keeps the judge's replies."),
    field: str = typer.Option(None, help="The field that holds the generated text, where several could."),
    set_: list[str] = typer.Option([], "--set", help="Any other option of the benchmark, key=value."),
    subset: bool = typer.Option(False, "--subset", help="Score only the items that were answered."),
) -> None:
    """Score answers without a model.

    Examples:

      revisit score chair captions.jsonl --ground-truth chair_gt.json --json

      revisit score pope answers.jsonl --questions coco_pope_random.json --parser vcd

      revisit score vqav2 results.json --annotations v2_mscoco_val2014_annotations.json

      revisit score mmmu total_val_output.json --answers answer_dict_val.json

      revisit score hallusionbench HallusionBench_result.json
    """
    from revisit.benchmarks import get
    from revisit.benchmarks.io.answers import read_answers
    from revisit.registry import parse_assignments

    options: dict[str, Any] = dict(parse_assignments(set_))
    named = {"parser": parser, "judge": judge, "judge_url": judge_url, "judge_model": judge_model}
    options |= {key: value for key, value in named.items() if value is not None}
    if judge_cache is not None:
        options["judge_cache"] = judge_cache
    if judge_url and judge is None:
        options["judge"] = "model"
    chosen = get(benchmark, **options)
    found = read_answers(answers, chosen.answer_fields, field)
    chosen = chosen.adapted(found, options)
    given = {"--ground-truth": ground_truth, "--questions": questions, "--annotations": annotations, "--answers": gold}
    truth = _truth(chosen, given, data)
    try:
        if data is not None:
            items, texts = chosen.load(data), _own(found)
        else:
            items, texts = chosen.match(found, truth)
        items, notes = _answered(items, texts, subset or chosen.partial)
        scores = chosen.score(items, texts)
        notes += _empty([texts[item.id] for item in items])
    except RevisitError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        read = ", ".join(map(str, [answers, *truth] if data is None else [answers, data]))
        raise RevisitError(
            f"{read} cannot be scored as {chosen.name}: something in there has another form than expected "
            f"({type(error).__name__}: {error}); compare with the layouts in docs/benchmarks.md."
        ) from error
    if as_json:
        typer.echo(_json(chosen, scores, len(items), notes, per_item))
    else:
        _table(chosen, scores, len(items), notes)


def _truth(benchmark: Benchmark, given: dict[str, list[Path]], data: Path | None) -> list[Path]:
    """The files to score against; a flag that this benchmark does not read is an error, not ignored."""
    for flag, paths in given.items():
        if paths and (flag != benchmark.truth or data is not None):
            instead = (
                "--data" if data is not None else benchmark.truth or "the gold answers that its result files carry"
            )
            raise RevisitError(f"{benchmark.name} is scored with {instead} here, not with {flag}.")
    return given.get(benchmark.truth, [])


def _own(found: list[Any]) -> dict[str, str]:
    """Answers of our store by item id."""
    from revisit.benchmarks.io.answers import by_id

    return {key: answer.text for key, answer in by_id(found, ("id",)).items()}


def _answered(items: list[Item], texts: dict[str, str], partial: bool) -> tuple[list[Item], tuple[str, ...]]:
    """With `partial`, the items that have an answer, and a note if that is not all of them."""
    kept = [item for item in items if item.id in texts]
    if not partial or len(kept) == len(items):
        return items, ()
    return kept, (f"Scored the {len(kept)} answered of {len(items)} items.",)


def _empty(texts: list[str]) -> tuple[str, ...]:
    """A note if there are answers without a word, or those that tables write for a missing value."""
    empty = sum(text.strip().lower() in ("", "nan") for text in texts)
    return (f"{empty} of {len(texts)} answers are empty, and count as the rule has it.",) if empty else ()


def _json(benchmark: Benchmark, scores: Scores, items: int, notes: tuple[str, ...], per_item: bool) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in scores.metrics.items()}
    result: dict[str, Any] = {
        "benchmark": benchmark.name,
        "version": benchmark.version,
        "items": items,
        "metrics": finite,
        "counts": {k: None if math.isnan(v) else int(v) if v == int(v) else v for k, v in scores.counts.items()},
        "notes": [*notes, *scores.notes],
    }
    if per_item:
        result["per_item"] = scores.per_item
    return json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)


def _table(benchmark: Benchmark, scores: Scores, items: int, notes: tuple[str, ...]) -> None:
    typer.echo(f"{benchmark.name} ({benchmark.version}), {items} items")
    width = max(map(len, scores.metrics))
    for name, value in scores.metrics.items():
        typer.echo(f"  {name:<{width}}  {benchmark.metric(name).text(value):>8}")
    for note in (*notes, *scores.notes):
        typer.echo(f"note: {note}", err=True)


def register(app: typer.Typer) -> None:
    app.command()(score)
