"""`prepare` with one prompt or many, and with no, one or several images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

import families
import revisit
from revisit import RevisitError


@pytest.fixture(scope="module")
def processor() -> Any:
    return families.build("llava")[1]


def same(a: Any, b: Any) -> bool:
    return bool((a["input_ids"] == b["input_ids"]).all() and (a["pixel_values"] == b["pixel_values"]).all())


def test_a_single_prompt_and_image_are_a_batch_of_one(processor: Any, tmp_path: Path) -> None:
    photo = families.image(0)
    batch = revisit.prepare(processor, ["hi"], [[photo]])
    buffer = io.BytesIO()
    photo.save(buffer, "PNG")
    (tmp_path / "x.png").write_bytes(buffer.getvalue())
    for image in (photo, [photo], [[photo]], buffer.getvalue(), np.asarray(photo), str(tmp_path / "x.png")):
        assert same(revisit.prepare(processor, "hi", image), batch)
    assert same(revisit.prepare(processor, ["hi"], [photo]), batch)


def test_a_batch_may_mix_one_several_and_no_images(processor: Any) -> None:
    a, b = families.image(0), families.image(1)
    inputs = revisit.prepare(processor, ["one", "two", "none"], [a, [a, b], None])
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (inputs["input_ids"] == token).sum(-1).tolist() == [16, 32, 0]
    assert len(inputs["pixel_values"]) == 3


def test_without_images(processor: Any) -> None:
    assert "pixel_values" not in revisit.prepare(processor, "hi")
    assert revisit.prepare(processor, ["hi", "you"])["input_ids"].shape[0] == 2


@pytest.mark.parametrize(
    ("prompts", "images", "message"),
    [
        (families.image(0), "hi", "prompt"),
        (None, None, "prompt"),
        (["hi", 3], None, "prompt"),
        ([], None, "prompts is empty"),
        (["a", "b"], families.image(0), "2 prompts"),
        (["a", "b"], [families.image(0)], "2 prompts"),
        ("hi <image>", None, "<image>"),
        ("hi", 7, "int"),
        ("hi", "no-such-file.png", "no-such-file.png"),
    ],
)
def test_wrong_calls_raise_one_sentence(processor: Any, prompts: Any, images: Any, message: str) -> None:
    with pytest.raises(RevisitError, match=message) as caught:
        revisit.prepare(processor, prompts, images)
    assert "\n" not in str(caught.value)


def test_a_panic_of_the_tokenizer_is_an_error(processor: Any) -> None:
    core = processor.tokenizer.backend_tokenizer
    before = core.pre_tokenizer
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")  # backtracks without end
    try:
        with pytest.raises(RevisitError, match="cannot encode"):
            revisit.prepare(processor, "x" * 3000, None)
    finally:
        core.pre_tokenizer = before


def test_characters_that_no_tokenizer_encodes_are_an_error(processor: Any) -> None:
    with pytest.raises(RevisitError, match="UTF-8"):
        revisit.prepare(processor, "O\udcf9 est le chat ?", families.image(0))
