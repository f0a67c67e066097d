"""`revisit doctor`: facts about the machine and a model's small files, and an exit status for scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import revisit
from revisit import RevisitError
from revisit.cli.doctor import parse_size
from revisit.cli.main import main
from revisit.embedded.samples import sample
from revisit.explain.sight import check_sight


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["revisit", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "tiny", "--image-size", "128x128", "--batch-size", "4", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["problems"] == []
    assert shown["machine"]["revisit"]
    assert shown["machine"]["ReVisiT's step on CPUs"].startswith(("in C", "in torch"))
    model = shown["model"]
    assert model["vision tokens of 128×128"] == "64"
    assert model["recommended"] == "layers=last, alpha=1e-05, neighbors=8, weight=agreement"
    # 64 tokens × 256 numbers × 4 bytes = 64 KB an image
    assert model["layers=last"] == "5; states 0.1 MB per image, 0.2 MB for a batch of 4"


def test_an_unsupported_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert run(monkeypatch, str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "✗" in out
    assert "gpt2" in out


def test_a_photo_changes_the_vision_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "tiny", "--image", str(sample().path), "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert out["problems"] == []
    assert out["sight"]["vision tokens found"] == "64, of which 100% change with the image"
    assert len(out["sight"]["words of the vision tokens"].split(", ")) > 2


class Blindfold:
    """A processor whose attention mask hides the image from the decoder."""

    def __init__(self, processor: Any, image_token: int) -> None:
        self.processor, self.image_token = processor, image_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)

    def __call__(self, **kwargs: Any) -> Any:
        inputs = self.processor(**kwargs)
        inputs["attention_mask"] = (inputs["input_ids"] != self.image_token).long()
        return inputs


def test_a_broken_vision_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = revisit.load("tiny")
    photo = sample().image()
    whole = check_sight(model, processor, photo)
    assert (whole.broken, whole.vision_tokens, whole.states) == ("", 64, 1.0)
    unread = check_sight(model, Blindfold(processor, model.config.image_token_id), photo)
    assert unread.next_token < 1e-6 < unread.states
    assert "the decoder does not use them" in unread.broken
    blank = torch.ones(1, 64, 256)
    monkeypatch.setattr(model.model.multi_modal_projector, "forward", lambda image_features: blank)
    blind = check_sight(model, processor, photo)
    assert blind.states == 0
    assert "the vision tower or its projector ignores the pixels" in blind.broken


def test_a_photo_needs_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--image", "photo.png") != 0
    assert "--image needs a model" in capsys.readouterr().err


def test_sizes() -> None:
    assert parse_size("640x480") == (640, 480)
    assert parse_size(" 10 × 20 ") == (10, 20)
    for bad in ("640", "ax3", "-1x5", "1x2x3"):
        with pytest.raises(RevisitError, match="such as 640x480"):
            parse_size(bad)
