"""The terminal's table of a decoding run."""

from __future__ import annotations

import made_up
import pytest

from revisit.cli import tables
from revisit.eval.report.document import table_markdown
from revisit.models.geometry import Layout


def test_the_table_lists_the_steps_that_mattered(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = made_up.decode()
    monkeypatch.setattr(tables, "MIN_SHIFT", 0.5)
    text = table_markdown(tables.steps_table(decode.answers[0], decode.layout))
    assert "3 of 18 steps changed" in text
    lines = [line for line in text.splitlines() if "other0" in line]
    assert len(lines) == 3
    token = made_up.selected(1, 96)
    assert f"{token // 12 + 1},{token % 12 + 1}" in lines[0]
    assert "25% → 80%" in lines[0]
    assert "small" in lines[0]
    assert "wooden" not in text


def test_without_a_layout_tokens_are_numbered() -> None:
    answer = made_up.answer(3, 96)
    table = tables.steps_table(answer, Layout(((4, 4),), 96, reason="unknown"))
    assert f"#{made_up.selected(1, 96)}" in table_markdown(table)
    assert "changed no step" in table_markdown(tables.steps_table(made_up.plain_answer(5)))


def test_weights_are_listed_if_they_differ_from_step_to_step() -> None:
    answer = made_up.answer(6, 96)
    for step in answer.steps:
        step.weight = 0.25
    fixed = tables.steps_table(answer, None).heads
    answer.method["weight"] = "agreement"
    adaptive = tables.steps_table(answer, None)
    assert adaptive.heads == (*fixed, "weight")
    assert {row[-1] for row in adaptive.rows} == {"0.25"}
