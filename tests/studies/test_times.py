"""Times of whole answers, and methods that do not support a model."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from revisit import RevisitError
from revisit.methods.icd import ICD
from studies.__main__ import app
from studies.times import METHODS


def test_methods_are_compared_with_greedy_or_shown_with_the_reason_why_they_do_not_run(
    tmp_path: object, nltk_data: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(self: ICD, prompt: object, passes: object) -> None:
        raise RevisitError("No such prompt here.")

    monkeypatch.setattr(ICD, "begin", unsupported)
    words = ["times", "--data", "scenes:unusual:4:7", "--max-new-tokens", "3", "--quiet", "--out", str(tmp_path)]
    chosen = [word for name in ("opera", "icd") for word in ("--method", name)]
    text = CliRunner().invoke(app, [*words, *chosen], catch_exceptions=False).output
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in text.splitlines()}
    assert lines["greedy"] == ["1.00"]
    assert float(lines["opera"][0]) > 1
    assert lines["icd"] == ["No such prompt here."]
    assert {"revisit", "vcd", "opera"} < set(METHODS)
