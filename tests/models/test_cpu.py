"""Machines that advertise AMX and refuse it, played by a file of CPU flags and a child process that dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import revisit
from revisit.errors import RevisitError
from revisit.models import cpu

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU that advertises AMX, with an empty cache folder."""
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: Some CPU\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n")
    monkeypatch.setattr(cpu, "CPU_INFO", info)
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    return monkeypatch


def test_a_child_that_dies_of_the_instruction_means_refused_and_is_tried_once(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cpu, "TRIAL", DIES)
    assert cpu.refuses_amx()
    machine.setattr(cpu, "TRIAL", "raise SystemExit('not called again')")
    assert cpu.refuses_amx()


def test_a_child_that_is_killed_says_nothing_about_the_cpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cpu, "TRIAL", DIES.replace("SIGILL", "SIGKILL"))  # as a system without memory does
    assert not cpu.refuses_amx()


def test_the_trial_itself_says_what_torch_can_do_here(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("ONEDNN_MAX_CPU_ISA", cpu.WITHOUT_AMX)  # works on every machine
    assert not cpu.refuses_amx()


def test_another_limit_for_onednn_is_another_trial(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cpu, "TRIAL", DIES)
    machine.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cpu.refuses_amx()
    machine.setattr(cpu, "TRIAL", "pass")
    machine.setenv("ONEDNN_MAX_CPU_ISA", cpu.WITHOUT_AMX)
    assert not cpu.refuses_amx()


@pytest.mark.parametrize("text", ["model name\t: Some CPU\nflags\t\t: fpu avx2\n", ""])
def test_no_child_is_started_without_amx(machine: pytest.MonkeyPatch, text: str) -> None:
    cpu.CPU_INFO.write_text(text)
    machine.setattr(cpu, "TRIAL", DIES)
    assert not cpu.refuses_amx()


def test_a_damaged_cache_file_is_made_again(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cpu, "TRIAL", DIES)
    assert cpu.refuses_amx()
    (stored,) = Path(cpu.settings.cache_folder()).glob("amx-*.json")
    stored.write_text("{")
    machine.setattr(cpu, "TRIAL", "pass")
    assert not cpu.refuses_amx()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_load_says_it_in_one_sentence_instead_of_dying(machine: pytest.MonkeyPatch, dtype: object) -> None:
    machine.setattr(cpu, "TRIAL", DIES)
    with pytest.raises(RevisitError, match="illegal instruction: load with dtype=float32") as caught:
        revisit.load("tiny", dtype=dtype)
    assert "\n" not in str(caught.value)
    assert revisit.load("tiny")[0].dtype == torch.float32
