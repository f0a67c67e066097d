"""Beam search for methods with their own loop: transformers' tokens and scores, also after stepping back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import families
import revisit
from revisit import Method
from revisit.decoding.loop import Loop
from revisit.decoding.run import Run
from revisit.methods.opera import Beams


class OwnBeams(Method):
    """Beam search by its own loop; after the third token it steps back once to the first and searches again."""

    back: bool = False

    name = "own-beams"

    def decode(self, run: Run, loop: Loop) -> Any:
        moments, step, back = [Beams.start(run)], 0, self.back
        while not bool(moments[step].over.all()):
            ids = moments[step].ids(run.input_ids)
            log_probs = run.forward(ids).log_softmax(-1)
            moments[step + 1 :] = [moments[step].step(loop.scores(ids, log_probs), run, loop)]
            step += 1
            if back and step == 3:
                back, step = False, 1
                run.crop(run.input_ids.shape[1])
            else:
                run.reorder(moments[step].rows.flatten())
        return Beams.answers(run, [moments[step]] * len(moments[step].over))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llava", {"early_stopping": True}),
        ("qwen2_5_vl", {"early_stopping": "never", "length_penalty": 2.0}),
        ("llava", {"length_penalty": 0.0, "num_return_sequences": 3}),
        ("qwen2_5_vl", {"min_new_tokens": 5}),
    ],
    ids=str,
)
def test_the_search_is_transformers_own(family: str, options: dict[str, Any]) -> None:
    model, _ = families.build(family)
    inputs = families.inputs(family, ["what is it", "and what is this"], [[families.image(n)] for n in (1, 2)])
    options = {"max_new_tokens": 7, "num_beams": 4, "do_sample": False, "pad_token_id": 0, **options}
    options |= {"eos_token_id": [2, *range(50, 150)], "return_dict_in_generate": True, "output_scores": True}
    want = model.generate(**inputs, **options)
    for back in (False, True):
        got = revisit.generate(model, **inputs, method=OwnBeams(back=back), **options)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=1e-4)
