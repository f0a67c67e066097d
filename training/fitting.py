"""Run one training stage: optimizer, schedule, log, and a checkpoint from which an interrupted stage resumes.

A checkpoint is `<stage>.safetensors` (weights and optimizer) with `<stage>.json` (step and settings), both replaced atomically.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from revisit.errors import RevisitError

Loss = Callable[[int], tuple[Tensor, dict[str, float]]]  # step -> loss and the values to log
Weights = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Stage:
    """The steps, batch size and learning rate of a stage."""

    steps: int
    rows: int
    rate: float

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1 or self.rate <= 0:
            raise RevisitError(f"A stage needs positive steps, rows and rate, not {self}.")


@dataclass(frozen=True)
class Checkpoint:
    """The files of a stage, and the settings that a run must have to resume from them."""

    folder: Path
    name: str
    identity: Mapping[str, Any]

    def write(self, step: int, weights: Weights, optimizer: torch.optim.AdamW) -> None:
        """Replace the checkpoint with the state after this step."""
        tensors = {f"weight/{k}": p.detach() for k, p in weights.items()}
        for key, parameter in weights.items():
            state = optimizer.state[parameter]
            tensors[f"first/{key}"], tensors[f"second/{key}"] = state["exp_avg"], state["exp_avg_sq"]
        meta = {"step": str(step), "identity": json.dumps(self.identity, sort_keys=True)}
        draft, path = self.folder / f"{self.name}.draft", self.folder / f"{self.name}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, draft, metadata=meta)
        os.replace(draft, path)
        draft_json = self.folder / f"{self.name}.json.draft"
        draft_json.write_text(json.dumps({"step": step, **self.identity}, indent=2) + "\n")
        os.replace(draft_json, self.folder / f"{self.name}.json")

    def read(self) -> tuple[int, dict[str, Tensor]] | None:
        """Return the step and the tensors, None if the stage has not begun; raise RevisitError if another recipe wrote them."""
        path = self.folder / f"{self.name}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            meta = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if json.loads(meta["identity"]) != json.loads(json.dumps(self.identity)):
            raise RevisitError(
                f"{path} was written by another recipe (see {self.name}.json beside it); continue with those settings or choose "
                "another folder."
            )
        return int(meta["step"]), tensors

    def resume(self, weights: Weights, optimizer: torch.optim.AdamW) -> int:
        """Restore weights and optimizer from the checkpoint; return the step to resume at."""
        found = self.read()
        if found is None:
            return 0
        step, tensors = found
        for key, parameter in weights.items():
            parameter.data.copy_(tensors[f"weight/{key}"])
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"first/{key}"].clone(),
                "exp_avg_sq": tensors[f"second/{key}"].clone(),
            }
        return step

    def finished(self, steps: int) -> dict[str, Tensor]:
        """Return the weights of a finished stage."""
        found = self.read()
        if found is None or found[0] < steps:
            raise RevisitError(f"The stage {self.name!r} is not finished in {self.folder}; run it first.")
        named = (key.partition("/") for key in found[1])
        return {parameter: found[1][f"{kind}/{parameter}"] for kind, _, parameter in named if kind == "weight"}


def fit(
    checkpoint: Checkpoint,
    stage: Stage,
    weights: Weights,
    loss_of: Loss,
    every: int,
    progress: Any = None,
    decay: float = 0.05,
) -> None:
    """Run a stage to its end, from its checkpoint if there is one; weight decay applies to matrices only."""
    groups = [
        {"params": [p for p in weights.values() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in weights.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), fused=True)
    step = checkpoint.resume(weights, optimizer)
    began, done_before = time.monotonic(), step
    while step < stage.steps:
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * schedule(step, stage.steps)
        loss, parts_of_loss = loss_of(step)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(weights.values(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0 or step == stage.steps:
            pace = (time.monotonic() - began) / (step - done_before)
            line = {"stage": checkpoint.name, "step": step, "loss": loss.item(), "norm": norm, "seconds_a_step": pace}
            _log(checkpoint.folder, {**line, **parts_of_loss})
        if step % every == 0 or step == stage.steps:
            checkpoint.write(step, weights, optimizer)
        if progress is not None:
            progress(checkpoint.name, step, stage.steps, loss.item())


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm-up over the first twentieth, then a cosine down to a twentieth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _log(folder: Path, line: Mapping[str, Any]) -> None:
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in line.items()}
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(rounded) + "\n")


def ordered_log(folder: Path, stages: Sequence[str]) -> str:
    """Return the log in step order; lines that a resumed run repeated replace the earlier ones."""
    lines: dict[tuple[int, int], str] = {}
    for text in (folder / "log.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines[stages.index(line["stage"]), line["step"]] = text
    return "".join(lines[key] + "\n" for key in sorted(lines))
