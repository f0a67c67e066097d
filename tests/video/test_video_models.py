"""Videos in prompts of real processors: every family and method, alone and in a batch, with places and times."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from PIL import Image

import families
import revisit
from revisit import methods
from revisit.decoding.decode import decode
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.models.geometry import layout_of
from revisit.models.parts import vision_mask, vision_token_ids
from revisit.models.prompts import prepare_opened
from revisit.video.clip import Video, Visual
from video_clips import picture
from video_models import pair, video

needs_torchvision = pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="needs torchvision")
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "glm4v")
METHODS = ("revisit", "vcd", "m3id", "sid", "ritual", "pai", "tcd", "greedy")


def answers(family: str, method: str, rows: list[list[Visual]]) -> list[tuple[int, ...]]:
    model, processor = pair(family)
    inputs = prepare_opened(processor, [f"What happens {n}?" for n in range(len(rows))], rows)
    made = methods.as_method(method, model)
    seeds = list(range(len(rows)))
    return [row.tokens for row in decode(model, processor, inputs, made, Decoding(max_new_tokens=6), seeds=seeds)]


@needs_torchvision
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_equals_the_row_in_a_batch_of_images_and_videos(family: str, method: str) -> None:
    model, processor = pair(family)
    rows: list[list[Visual]] = [[video(1)], [video(2)]]
    if family != "glm4v" and method != "tcd":  # neither can mix images and videos
        rows += [[families.image(7)], [families.image(8), video(3)]]
    made = methods.as_method(method, model)

    together = answers(family, method, rows)
    for number, row in enumerate(rows):
        inputs = prepare_opened(processor, [f"What happens {number}?"], [row])
        (alone,) = decode(model, processor, inputs, made, Decoding(max_new_tokens=6), seeds=[number])
        assert alone.tokens == together[number]


@needs_torchvision
@pytest.mark.parametrize("family", FAMILIES)
def test_vision_tokens_have_a_frame_a_time_and_a_box(family: str) -> None:
    model, processor = pair(family)
    rows: list[list[Visual]] = [[video(1)], [video(2), video(3)], [families.image(4, (28, 28))]]
    if family == "qwen3_vl":
        rows.append([families.image(4, (28, 28)), video(5, step=2.0)])
    inputs = prepare_opened(processor, ["What happens?"] * len(rows), rows)
    for number, row in enumerate(rows):
        layout = layout_of(model, processor, rows, inputs, number)
        assert not layout.reason
        count = int(vision_mask(inputs["input_ids"][number], vision_token_ids(model.config)).sum())
        regions = [layout.region(token) for token in range(count)]
        found = [region for region in regions if region is not None]
        shown = [time for visual in row for time in (visual.times if isinstance(visual, Video) else [None])]
        assert list(layout.times) == shown
        for image, time in enumerate(shown):
            own = [region for region in found if region.image <= image < region.image + max(len(region.times), 1)]
            width, height = layout.sizes[image]
            covered = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (region.box for region in own))
            assert covered >= 0.99 * width * height
            assert all(time is None or time in region.times for region in own)


@needs_torchvision
def test_the_prompt_states_the_times_of_the_frames() -> None:
    _, processor = pair("qwen3_vl")
    frames = [Image.fromarray(picture(number)) for number in range(4)]
    inputs = revisit.prepare(processor, "What?", videos=list(zip(frames, (0.1, 0.5, 7.2, 9.0), strict=True)))

    text = processor.tokenizer.decode(inputs["input_ids"][0])
    assert "<0.3 seconds>" in text  # of the first two frames
    assert "<8.1 seconds>" in text


@needs_torchvision
def test_a_moved_pixel_of_the_last_frame_changes_only_its_tokens() -> None:
    """The layout's regions agree with the pixels that the model gets."""
    model, processor = pair("qwen3_vl")
    changed = video(1)
    changed.pixels[3, :14, :14] = 255 - changed.pixels[3, :14, :14]
    states = []
    for clip in (video(1), changed):
        inputs = prepare_opened(processor, ["What?"], [[clip]])
        with torch.no_grad():
            features = model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output
        states.append(torch.cat(list(features)))
    layout = layout_of(model, processor, [[changed]], inputs)
    moved = {int(token) for token in (states[0] != states[1]).any(-1).nonzero()}
    touched = [layout.region(token) for token in sorted(moved)]
    assert touched
    assert all(region is not None and region.times == (1.0, 1.5) for region in touched)


@needs_torchvision
def test_ask_check_and_lens_know_when() -> None:
    loaded = pair("qwen3_vl")
    answer = revisit.ask(loaded, video=video(1, 6), question="What?", frames=4, max_new_tokens=4)
    step = next(step for step in answer.trace.rows[0].records if step.vision_token is not None)
    assert step.time in (0.0, 1.0, 1.5, 2.0, 2.5, 0.5)
    assert len(answer.images) == 4

    checked = revisit.check(loaded, text="A red cat.", video=[video(1), video(2)], words="content")
    assert {word.time for word in checked.checked} <= {0.0, 1.0}
    assert all(word.image in (1, 3, 5, 7) for word in checked.checked)

    looked = revisit.lens(loaded, video=video(1), layers="last")
    assert looked.layout.times == (0.0, 0.5, 1.0, 1.5)


def test_models_for_images_and_missing_torchvision_give_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _, processor = families.build("llava")
    with pytest.raises(RevisitError, match="reads images, not videos"):
        prepare_opened(processor, ["What?"], [[video(1)]])
    _, processor = pair("qwen3_vl")
    monkeypatch.setattr(processor, "video_processor", None)
    with pytest.raises(RevisitError, match="pip install torchvision"):
        prepare_opened(processor, ["What?"], [[video(1)]])
