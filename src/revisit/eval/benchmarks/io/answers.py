"""Answers of a file, attached to the items of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from revisit.errors import RevisitError
from revisit.explain.records import AnswerRow

if TYPE_CHECKING:
    from revisit.eval.benchmarks.base import Item


def attach(
    answers: Sequence[AnswerRow], items: Sequence[Item], key: Callable[[AnswerRow], str | None] = AnswerRow.key
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
