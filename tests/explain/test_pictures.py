"""Tables and pictures of a decode and a lens."""

from __future__ import annotations

import io
from pathlib import Path

import made_up
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import families
from revisit import RevisitError
from revisit.cli import tables
from revisit.explain import figure, lens
from revisit.explain.record import Decode
from revisit.models.geometry import Layout
from revisit.report.document import Table
from revisit.report.terminal import print_table


def printed(table: Table) -> str:
    out = io.StringIO()
    print_table(table, Console(file=out, width=160, force_terminal=True, no_color=True, color_system=None))
    return out.getvalue()


def test_the_table_shows_the_steps_that_mattered(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = made_up.decode()
    monkeypatch.setattr(tables, "MIN_SHIFT", 0.5)
    text = printed(tables.steps_table(decode.answers[0], decode.layout))
    assert "3 of 18 steps changed" in text
    lines = [line for line in text.splitlines() if "other0" in line]
    assert len(lines) == 3
    token = made_up.speaker(1, 96)
    assert f"{token // 12 + 1},{token % 12 + 1}" in lines[0]
    assert "25% → 80%" in lines[0]
    assert " small " in lines[0]
    assert "wooden" not in text


def test_the_table_without_a_layout_numbers_the_tokens() -> None:
    answer = made_up.answer(3, 96)
    assert f"#{made_up.speaker(1, 96)}" in printed(tables.steps_table(answer, Layout(((4, 4),), 96, reason="unknown")))
    calm = made_up.plain_answer(5)
    assert "changed no step noticeably" in printed(tables.steps_table(calm))


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_decode_as_a_picture(tmp_path: Path, ending: str) -> None:
    path = figure.save(figure.decode_figure(made_up.decode()), tmp_path / f"out{ending}", dpi=80)
    if ending == ".png":
        with Image.open(path) as image:
            assert image.width == pytest.approx(7 * 80, abs=2)
            assert image.height > 400
    elif ending == ".svg":
        text = path.read_text("utf-8")
        assert "vision token" in text
        assert "not other0" in text
        assert "step 2: small" in text
    else:
        assert path.read_bytes().startswith(b"%PDF")


def test_chosen_steps_and_bad_ones() -> None:
    answer = made_up.answer(18, 96)
    assert figure.steps_to_draw(answer, [4, 1]) == [4, 1]
    assert [answer.steps[n].instead_of is not None for n in figure.steps_to_draw(answer, None)].count(True) == 3
    with pytest.raises(RevisitError, match="no step 19"):
        figure.steps_to_draw(answer, [18])
    plain = Decode([made_up.scene()], "?", "m", made_up.even_layout((480, 320), 2, 2), [made_up.plain_answer(4)])
    with pytest.raises(RevisitError, match="nothing to draw"):
        figure.decode_figure(plain)
    with pytest.raises(RevisitError, match=r"out\.gif: use \.png"):
        figure.save(figure.decode_figure(made_up.decode()), "out.gif")


def test_a_lens_as_a_picture_and_tables(tmp_path: Path) -> None:
    model, processor = families.build("llava")
    seen = lens.read_vision_tokens(model, processor, [families.picture(1, (90, 60))], {"words": ["a", "b", "c"]})
    path = figure.save(figure.lens_figure(seen, 1), tmp_path / "maps.svg")
    assert "share among these words" in path.read_text("utf-8")
    with pytest.raises(RevisitError, match="Heat maps need words"):
        figure.lens_figure(seen, 0)
    maps = seen.readings[1].maps
    assert maps is not None
    text = printed(tables.words_table(seen, 1, 4))
    best = int(maps[4, :, 0].argmax())
    row = next(line for line in text.splitlines() if line.split()[:1] == ["a"])
    assert f"{float(maps[4, best, 0]):.1%}" in row
    assert f"{best // 4 + 1},{best % 4 + 1}" in row
    assert "the 3 of 16 patches with the most probable word" in printed(tables.patches_table(seen, 0, 4, most=3))


def test_the_selected_patch_is_bright_also_where_the_largest_divergence_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[np.ndarray] = []
    monkeypatch.setattr(figure, "_heat", lambda axes, layout, values, *_: drawn.append(values))
    decode = made_up.decode()
    figure.decode_figure(decode, steps=[1])
    decode.answers[0].method["select"] = "max"
    figure.decode_figure(decode, steps=[1])
    assert (drawn[0] == -drawn[1]).all()
    assert drawn[1] is decode.answers[0].steps[1].heat
