"""`revisit doctor --gpu` on a machine without a GPU, and its statuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

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
    right = gpu_doctor.take

    def wrong(shape: gpu_doctor.Shape, implementation: str | None) -> torch.Tensor:
        scores = right(shape, implementation)
        return scores if implementation == "reference" else scores.roll(1, -1)

    monkeypatch.setattr(gpu_doctor, "take", wrong)
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


def probed(job: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """Return what a right engine answers on a GPU."""
    found = {
        "plain": [[1, 2]],
        "logprobs": [[-0.5, -1.0]],
        "exact": True,
    }
    if job["layers"] is None:
        return found
    speeds = [(rows, 100.0, 90.0) for rows in job["rows"]]
    return {**found, "refined": [[3, 4]], "outside_top_p": 0, "steps": {"triton": 9}, "speeds": speeds}


@pytest.mark.parametrize(
    ("eager", "changes", "name", "status"),
    [
        (None, {}, None, None),
        (True, {"refined": [[3, 5]]}, "vLLM: tokens compiled and with eager", "FAIL"),
        (True, {"refined": [[3, 5]], "exact": False}, "vLLM: tokens compiled and with eager", "FAIL"),
        (False, {"plain": [[1, 3]]}, "vLLM: requests without ReVisiT are unchanged", "FAIL"),
        (False, {"logprobs": [[-0.5, -1.1]]}, "vLLM: requests without ReVisiT are unchanged", "FAIL"),
        (True, {"logprobs": [[-0.5, -1.1]]}, None, None),  # which are rounded differently
        (True, {"outside_top_p": 2}, "vLLM: top_p in 96 refined rows", "FAIL"),
        (True, {"steps": {"triton": 9, "torch: 20,000 vision states": 1}}, "vLLM: steps", "SLOW"),
        (False, {"exact": False, "refined": [[3, 5]]}, None, None),
        (False, {"speeds": [(64, 100.0, 50.0)]}, "vLLM: 64 requests at a time", "SLOW"),
    ],
)
def test_what_engines_answer_is_compared(
    eager: bool | None, changes: Any, name: str | None, status: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines on a GPU, where those that are compiled, or those that are not, answer something else."""

    def start(job: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
        right = probed(job, environ)
        changed = {key: value for key, value in changes.items() if key in right}
        return right | changed if job["eager"] is eager and job["layers"] else right

    monkeypatch.setattr(gpu_doctor, "_start", start)
    monkeypatch.setattr(gpu_doctor, "version", lambda _: "0.32.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wrong = {check.name: check.status for check in gpu_doctor.serving("tiny") if check.status != "PASS"}
    assert wrong == ({} if name is None else {name: status})


def test_an_engine_that_does_not_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_doctor, "_start", lambda job, _: "no room" if job["layers"] else probed(job, {}))
    monkeypatch.setattr(gpu_doctor, "version", lambda _: "0.32.0")
    *_, last = gpu_doctor.serving("tiny")
    assert last == Check("vLLM, all layers", "FAIL", "no room")


def test_options_without_effect_raise(run: Run) -> None:
    done = run("doctor", "--vllm")
    assert done.status == 2
    assert "--gpu" in done.sentence


def test_the_status_of_a_report() -> None:
    assert status([Check("a", "PASS")]) == 0
    assert status([Check("a", "PASS"), Check("b", "SLOW")]) == 2
    assert status([Check("b", "SLOW"), Check("c", "FAIL")]) == 1
