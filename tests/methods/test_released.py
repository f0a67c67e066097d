"""Six methods against their authors' unchanged files, which were run on the model of released_llava.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import released_llava
import revisit
from revisit.methods import as_method

RECORDED = released_llava.RECORDED


@pytest.mark.parametrize(
    "row", RECORDED["rows"], ids=lambda row: f"{row['method']}-{row['image']}-{row['prompt']}-{row['beams']}"
)
def test_tokens_and_scores_of_the_released_code(row: dict[str, Any]) -> None:
    inputs = released_llava.inputs(*RECORDED["prompts"][row["prompt"]], row["image"])
    output = revisit.generate(
        released_llava.build(),
        **inputs,
        method=as_method(row["method"], **row["settings"]),
        max_new_tokens=len(row["tokens"]),
        num_beams=row["beams"],
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :]
    assert tokens.tolist() == row["tokens"]
    if row["beams"] > 1:
        return
    scores = torch.cat(output.scores)  # (steps, V)
    torch.testing.assert_close(scores.gather(1, tokens[:, None])[:, 0], torch.tensor(row["chosen"]), atol=2e-4, rtol=0)
    assert scores.isfinite().sum(-1).tolist() == row["kept"]
    probed = scores[: len(row["probe"]), RECORDED["probe"]]
    want = torch.tensor([[-torch.inf if score is None else score for score in step] for step in row["probe"]])
    torch.testing.assert_close(probed, want, atol=2e-4, rtol=0)
