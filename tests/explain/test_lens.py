"""`revisit.lens` against the same computation with transformers alone, its page and tables."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

import families
import revisit
from revisit import RevisitError
from revisit.cli.lens import patches_table, words_table
from revisit.eval.report.document import table_markdown
from revisit.forward import support
from revisit.models import DESCRIBE
from revisit.models.prompts import prepare
from revisit.models.tokens import token_text

IMAGE = families.image(1, (90, 60))


@pytest.fixture(scope="module")
def seen() -> revisit.Lens:
    return revisit.lens(families.build("llava"), IMAGE, ["a", "b", "c", "zebra"], top=3)


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    """Logits of all vision tokens at all layers over the whole vocabulary (layers, tokens, V), by transformers alone."""
    model, processor = families.build("llava")
    inputs = prepare(processor, [DESCRIBE], [[IMAGE]])
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
        mask = inputs["input_ids"][0] == model.config.image_token_id
        return torch.stack([model.lm_head(state[0][mask]) for state in hidden])


def test_the_likeliest_tokens(seen: revisit.Lens, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices much smaller than the table give the same tokens and probabilities."""
    model, processor = families.build("llava")
    monkeypatch.setattr(support, "CHUNK_NUMBERS", 2000)
    sliced = revisit.lens((model, processor), IMAGE, top=3)
    probabilities, top = whole.softmax(-1).topk(3, dim=-1)
    for reading in (seen.readings[0], sliced.readings[0]):
        assert torch.allclose(reading.probabilities, probabilities, atol=1e-5)
        texts = [[reading.entries[n] for n in row] for row in reading.top[-1].tolist()]
        assert texts == [[token_text(processor.tokenizer, i) for i in row] for row in top[-1].tolist()]
    assert seen.layers == (0, 1, 2, 3, 4)
    assert seen.layout.tokens == 16


def test_shares_within_a_set(seen: revisit.Lens, whole: torch.Tensor) -> None:
    tokenizer = families.build("llava")[1].tokenizer
    ids = [tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("a", "b", "c")]
    assert all(len(i) == 1 for i in ids)
    shares = whole[:, :, [i[0] for i in ids]].softmax(-1)
    reading = seen.readings[1]
    assert reading.entries == ["a", "b", "c"]
    assert reading.maps is not None
    assert torch.allclose(reading.maps, shares, atol=1e-5)
    assert torch.allclose(reading.probabilities, shares.topk(3, dim=-1).values, atol=1e-5)
    assert len(seen.notes) == 1
    assert "zebra" in seen.notes[0]


@pytest.mark.parametrize(
    ("words", "problem"), [(["zebra", "a"], "not single tokens: zebra"), (["a"], "only a was given")]
)
def test_fewer_than_two_single_tokens_raise(words: list[str], problem: str) -> None:
    with pytest.raises(RevisitError, match=problem):
        revisit.lens(families.build("llava"), IMAGE, words)


def test_the_page_contains_the_readings(seen: revisit.Lens, tmp_path: Path) -> None:
    words = seen.readings[1].payload()
    maps = np.frombuffer(base64.b64decode(words["maps"]), "uint8").reshape(5, 16, 3)
    assert seen.readings[1].maps is not None
    assert np.abs(maps / 255 - seen.readings[1].maps.numpy()).max() < 0.003
    top = np.frombuffer(base64.b64decode(words["top"]), "int32").reshape(5, 16, 3)
    assert (top == seen.readings[1].top.numpy()).all()
    assert "LensView" in seen.save(tmp_path / "lens.html").read_text("utf-8")
    assert "srcdoc=" in seen._repr_html_()
    assert len(repr(seen)) < 100
    with pytest.raises(RevisitError, match=r"\.html"):
        seen.save(tmp_path / "maps.png")


def test_tables(seen: revisit.Lens) -> None:
    reading = seen.readings[1]
    assert reading.maps is not None
    best = int(reading.maps[4, :, 0].argmax())
    row = next(row for row in words_table(seen, reading, 4).rows if row[0] == "a")
    assert row[1] == f"{float(reading.maps[4, best, 0]):.1%}"
    assert row[2] == f"{best // 4 + 1},{best % 4 + 1}"
    assert "16 of 16 patches" in table_markdown(patches_table(seen, seen.readings[0], 4))
