"""TCD: its formula from the logits of two runs, its frames, and its constraints."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

import revisit
from revisit import RevisitError
from revisit.methods.tcd import TCD, negative_frames, published_cut
from revisit.models.prompts import prepare_opened
from revisit.video.clip import Video
from video_models import pair, video

needs_torchvision = pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="needs torchvision")


def test_negative_frames() -> None:
    frames = torch.arange(5.0)[:, None]
    assert negative_frames(frames, "subset").squeeze(-1).tolist() == [0, 0, 2, 2, 4]
    assert negative_frames(frames, "reverse").squeeze(-1).tolist() == [4, 3, 2, 1, 0]
    assert negative_frames(frames, "mean").squeeze(-1).tolist() == [2] * 5
    assert sorted(negative_frames(frames, "shuffle").squeeze(-1).tolist()) == [0, 1, 2, 3, 4]


def test_the_published_constraint_depends_on_the_scale_of_the_logits() -> None:
    scores, logits = torch.tensor([[4.0, 1.0, -1.0], [-4.0, -8.0, -9.0]]), torch.tensor([[3.0, 1.0, 0], [-2.0, -3, -4]])
    assert published_cut(scores, logits, 0.5).tolist() == [[4, -math.inf, -math.inf], [-4, -8, -9]]  # all are below -1


@needs_torchvision
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v", "llava_onevision", "internvl"])
@pytest.mark.parametrize("negative", ["subset", "reverse"])
def test_its_scores_are_its_formula_over_the_logits_of_two_runs(family: str, negative: Any) -> None:
    model, processor = pair(family)
    clip = video(1, frames=6)
    kept = [0, 0, 2, 2, 4, 4] if negative == "subset" else [5, 4, 3, 2, 1, 0]
    other = Video(clip.pixels[kept], clip.times, clip.indices, clip.duration)
    inputs, changed = (prepare_opened(processor, ["What happens?"], [[shown]]) for shown in (clip, other))

    method = TCD(beta=0.1, negative=negative)
    output = revisit.generate(
        model,
        **inputs,
        method=method,
        max_new_tokens=1,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        plain, contrasted = (model(**own).logits[0, -1] for own in (inputs, changed))
    expected = 1.5 * plain - 0.5 * contrasted
    expected[plain.softmax(-1) < 0.1 * plain.softmax(-1).max()] = -math.inf
    torch.testing.assert_close(output.scores[0][0], expected, rtol=1e-3, atol=1e-3)
    assert (plain - contrasted).abs().max() > 1e-3


@needs_torchvision
def test_it_differs_from_greedy_and_needs_a_video() -> None:
    loaded = pair("qwen3_vl")
    texts = [
        [revisit.ask(loaded, video=video(seed), method=method, max_new_tokens=8).text for seed in range(3)]
        for method in ("greedy", TCD(alpha=2.0), TCD.official(alpha=2.0))
    ]
    assert texts[1] != texts[0] != texts[2]
    image = video(1).frames[0]
    with pytest.raises(RevisitError, match="needs a video"):
        revisit.ask(loaded, image, method="tcd", max_new_tokens=1)
