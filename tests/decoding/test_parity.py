"""Agreement with the published code and with the numbers the paper prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import parity_pack
from revisit import ReVisiT, Trace
from revisit.step import reference as core


@pytest.fixture(scope="module")
def pack() -> tuple[Any, list[dict[str, Any]]]:
    return parity_pack.load()


@pytest.mark.parametrize("layers", ["last", "all", "low", "high"])
def test_published_code_token_for_token(pack: Any, layers: str) -> None:
    model, cases = pack
    rows = [row for row in parity_pack.rows("revisit") if row["layers"] == layers]
    assert len(rows) == 16
    for row in rows:
        inputs = cases[row["case"]]
        trace = Trace()
        out = model.generate(
            **inputs,
            custom_generate=ReVisiT.official(layers=layers, alpha=row["alpha"]),
            trace=trace,
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert out.sequences[0, inputs["input_ids"].shape[1] :].tolist() == row["tokens"]
        assert trace.rows[0].plausible_tokens == row["vcons"]
        for scores, best in zip(out.scores, row["top_scores"], strict=True):
            mine = scores[0].topk(len(best)).values
            torch.testing.assert_close(mine, torch.tensor(best), atol=1e-4, rtol=0)


def test_the_papers_printed_tables_follow_from_their_own_columns() -> None:
    """The two tables of the paper's appendix: log-probability and percent of base, vision and final, token by token."""
    printed = json.loads((Path(__file__).parents[1] / "data" / "paper_token_tables.json").read_text("utf-8"))
    tables = [torch.tensor(rows, dtype=torch.float64) for rows in printed]
    assert sorted(len(table) for table in tables) == [19, 55]
    for table in tables:
        base, vision, final, percent = table[:, 0], table[:, 2], table[:, 4], table[:, 5]
        fused = core.fuse(base, vision, "poe", 1.0)
        assert (fused - final).abs().max() <= 0.011
        made = 100 * fused.softmax(-1)
        assert (made - percent).abs().max() <= 0.25  # two printed decimals of a log-probability allow that much
    fruit = next(table for table in tables if len(table) == 55)
    made = 100 * core.fuse(fruit[:, 0], fruit[:, 2], "poe", 1.0).softmax(-1)
    assert made[:2].tolist() == pytest.approx([58.22, 38.26], abs=0.01)
