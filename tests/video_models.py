"""Tiny models with processors of videos, and clips for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import families
from revisit.video.clip import Video


def video(seed: int, frames: int = 4, step: float = 0.5) -> Video:
    images = [families.image(100 * seed + number, (56, 28)) for number in range(frames)]
    return Video.of(images, [number * step for number in range(frames)])


@functools.cache
def pair(family: str) -> tuple[Any, Any]:
    model, processor = families.build(family)
    processor = copy.copy(processor)
    processor.chat_template = families.template(family)
    return model, processor
