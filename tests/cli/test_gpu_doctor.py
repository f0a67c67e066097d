"""`revisit doctor --gpu` on a machine without a GPU, and its statuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from command_line import Run

from revisit.cli import gpu_doctor
from revisit.cli.checkup import Check, status
from revisit.cli.gpu_doctor import SMALL, example, prepared, settings, take


def test_a_report_without_a_gpu(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("doctor", "--gpu", "--out", str(tmp_path / "report.json"))
    assert done.status == 2
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert set(statuses.values()) == {"PASS", "needs a GPU"}
    assert statuses["fast step and reference, float32"] == "PASS"
    assert statuses["CUDA graph"] == "needs a GPU"
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text


def test_a_wrong_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_doctor.refine_logits

    def wrong(states: object, head: object, logits: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        scores = right(states, head, logits, *args, **options)  # type: ignore[arg-type]
        return scores if args[1] == "reference" else scores.roll(1, -1)

    monkeypatch.setattr(gpu_doctor, "refine_logits", wrong)
    found = [check for check in gpu_doctor.numbers() if check.status != "needs a GPU"]
    assert {check.status for check in found} == {"FAIL"}
    assert status(found) == 1


def test_a_check_that_raises_fails_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Check]:
        raise OSError("cannot open /home/somebody/x.json now")

    for name in ("environment", "compilation", "numbers", "host", "speed", "decoding"):
        monkeypatch.setattr(gpu_doctor, name, lambda *_: [Check("a", "PASS")])
    broken.__name__ = "host"
    monkeypatch.setattr(gpu_doctor, "host", broken)
    (failed,) = [check for check in gpu_doctor.checks("tiny", False) if check.status == "FAIL"]
    assert failed == Check("host", "FAIL", "OSError: cannot open … now")


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_an_example_has_its_number_of_candidates(shape: gpu_doctor.Shape) -> None:
    _, _, logits, _ = example(shape, torch.device("cpu"))
    alpha = settings(shape, logits)["alpha"]
    assert int((logits[0].softmax(-1) >= alpha * logits[0].softmax(-1).max()).sum()) == shape.candidates
    assert int(take(shape, "reference")[0].isfinite().sum()) == shape.candidates


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_a_prepared_step_gives_the_same_scores_every_time(shape: gpu_doctor.Shape) -> None:
    step, inputs = prepared(shape, "torch", torch.device("cpu"))
    expected = take(shape, "torch")
    assert torch.equal(step.take(inputs).scores, expected)
    assert torch.equal(step.take(inputs).scores, expected)


def test_options_without_effect_raise(run: Run) -> None:
    done = run("doctor", "--vllm")
    assert done.status == 2
    assert "--gpu" in done.sentence


def test_the_status_of_a_report() -> None:
    assert status([Check("a", "PASS")]) == 0
    assert status([Check("a", "PASS"), Check("b", "SLOW")]) == 2
    assert status([Check("b", "SLOW"), Check("c", "FAIL")]) == 1
