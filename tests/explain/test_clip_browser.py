"""The page of a clip in a browser: the strip, the chosen frame with its patch, and the time under each word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_browser import show

import families
import made_up
from revisit.pages.answers import AnswerPage

pytestmark = pytest.mark.browser


def test_a_word_shows_its_frame_and_time(seen: Any, tmp_path: Path) -> None:
    one = made_up.even_layout((480, 320), 2, 2)
    grids = [replace(one.grids[0], image=2 * k, first=4 * k, frames=2) for k in range(2)]  # four frames in two pairs
    layout = replace(one, sizes=one.sizes * 4, tokens=8, grids=tuple(grids), times=(0.0, 0.5, 1.0, 1.5))
    steps = [made_up.step(number, f" word{number}", vision_token=token) for number, token in enumerate((5, 2))]
    answer = made_up.output("revisit", steps)
    images = [families.image(number) for number in range(4)]
    page = show(seen, tmp_path, AnswerPage(images, "?", "m", layout, [answer]))

    assert page.locator(".thumb").all_inner_texts() == ["0.00 s", "0.50 s", "1.00 s", "1.50 s"]
    first, second = page.locator(".tok").all()
    assert [word.get_attribute("data-when") for word in (first, second)] == ["1.00–1.50 s", "0.00–0.50 s"]
    for word, chosen in ((second, 0), (first, 2)):
        word.click()
        assert page.locator(".thumb[aria-pressed=true]").inner_text() == f"{chosen / 2:.2f} s"
        assert page.locator(".frame:visible").count() == 1
        assert page.locator(".frame:visible .spot").is_visible()
    page.locator(".thumb").nth(3).click()  # the other frame of the pair has the same patch
    assert page.locator(".frame:visible .spot").is_visible()
    page.locator(".thumb").nth(0).click()
    assert not page.locator(".frame:visible .spot").is_visible()
