"""The Triton step compiles for real GPUs without spilling registers, within their shared memory. Run by `make test-triton`.

`python tests/step/test_triton_compiled.py` prints a table of the compiled kernels.
"""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from revisit.step.interface import RowStates, StepOutput
from revisit.step.rule import Rule

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from revisit.step import triton as kernels

pytestmark = pytest.mark.timeout(1800)
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
if VERSION >= (3, 4):  # older versions do not know the first, and lack a linker for the second
    TARGETS |= {"sm_100": GPUTarget("cuda", 100, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SPILLS = 0 if VERSION >= (3, 4) else 16
SHARED = {"cuda": 99 << 10, "hip": 64 << 10}  # the least of all GPUs that the tiles are chosen for
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
TYPES |= {torch.int64: "*i64", torch.bool: "*i1", torch.int8: "*i8"}


class Shape(NamedTuple):
    """A step whose kernels are compiled."""

    name: str
    dtype: torch.dtype
    rows: int
    vision_tokens: int
    width: int
    vocabulary: int
    rule: Rule = Rule()
    logits: torch.dtype = torch.float32
    blocks: int = 1
    in_place: bool = False  # some rows of the logits, as in vLLM
    ended: bool = False
    split: bool = False  # the head, over several GPUs


ADAPTIVE = Rule(weight="both", neighbors=8, normalize=False, once=0.5)
SHAPES = [
    Shape("LLaVA-1.5-7B, batch 1", torch.float16, 1, 576, 4096, 32064),
    Shape("LLaVA-1.5-7B, batch 64", torch.float16, 64, 576, 4096, 32064, ended=True),
    Shape("Qwen2.5-VL-7B, all, batch 1", torch.bfloat16, 1, 15 * 1024, 3584, 152064),
    Shape(
        "Qwen2.5-VL-7B, all, vLLM, batch 8",
        torch.bfloat16,
        8,
        18 * 1024,
        3584,
        152064,
        Rule(once=1.0),
        blocks=18,
        in_place=True,
    ),
    Shape(
        "Qwen2.5-VL-7B, 16 k, all", torch.bfloat16, 8, 240 * 1024, 3584, 152064, ADAPTIVE, torch.bfloat16, ended=True
    ),
    Shape("a model of 70 B on 8 GPUs, batch 8", torch.bfloat16, 8, 1024, 8192, 128256, split=True),
    Shape("float32", torch.float32, 2, 1000, 1024, 50001, ADAPTIVE, ended=True),
]


def launches(shape: Shape, hip: bool) -> Iterator[Any]:
    """Yield the kernels of a step, with tensors that have shapes and no memory."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    rows, size = shape.rows, shape.vision_tokens // shape.blocks
    pool = empty(rows * shape.blocks, size, shape.width, dtype=shape.dtype)
    states = RowStates(pool, np.zeros((rows, shape.blocks), np.int64), np.ones(rows, np.int64))
    tiles = kernels.tiles_for(rows, states.longest, shape.dtype, hip)
    logits = empty(rows, shape.vocabulary, dtype=shape.logits)
    flags = [empty(rows, dtype=torch.bool) for _ in range(3)]
    numbers = [empty(rows, dtype=torch.int32) for _ in range(2)]
    out = StepOutput(logits, numbers[0], flags[0], flags[1], numbers[1], empty(rows))
    buffers = kernels.allocate({}, logits, states, shape.rule, tiles)
    head = empty(shape.vocabulary, shape.width, dtype=shape.dtype)
    ended, places = flags[2] if shape.ended else None, empty(rows, dtype=torch.int64) if shape.in_place else None
    gap = 1e5 if shape.in_place else math.inf
    written = empty(rows, 77, dtype=torch.int64)
    gather = (lambda ids: empty(len(ids), shape.width, dtype=shape.dtype)) if shape.split else None
    with mock.patch.object(kernels, "plausible_ids", return_value=empty(500, dtype=torch.int32)):
        rule, rest = shape.rule, (ended, places, gap, written, gather)
        yield from kernels.launches(logits, states, head, rule, buffers, out, tiles, *rest)


def source(launch: Any) -> ASTSource:
    """Return a kernel with the types that Triton's launcher would give it: 1 and None are constants, 16 divides pointers."""
    signature, constants, hints = {}, {}, {}
    for place, (name, value) in enumerate(launch.arguments.items()):
        parameter = launch.kernel.params[place]
        fixed = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and fixed):
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                hints[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and fixed:
                hints[(place,)] = [["tt.divisibility", 16]]
    if VERSION < (3, 3):
        from triton.backends.compiler import AttrsDescriptor

        described = AttrsDescriptor()
        described.arg_properties = {"tt.divisibility": [place for (place,) in hints]}
        named = {launch.kernel.arg_names[place]: value for (place,), value in constants.items()}
        given = {name: kind for name, kind in signature.items() if kind != "constexpr" or named[name] is None}
        given = {name: "*i8" if kind == "constexpr" else kind for name, kind in given.items()}
        return ASTSource(launch.kernel, given, named, described)
    return ASTSource(launch.kernel, signature, constants, hints)


class Compiled(NamedTuple):
    """The compiler's figures for a kernel."""

    kernel: str
    target: str
    registers: int
    spills: int  # bytes on NVIDIA GPUs, registers on AMD's
    shared: int  # bytes
    size: int  # bytes of code


def compile_launch(launch: Any, target: str) -> Compiled:
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": False}
    made = triton.compile(source(launch), target=TARGETS[target], options=options)
    if "cubin" in made.asm:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        count = functools.partial(_number, usage)
        registers, spills = count(r"REG:(\d+)"), count(r"STACK:(\d+)") + count(r"LOCAL:(\d+)")
        size = len(made.asm["cubin"])
    else:
        count = functools.partial(_number, made.asm["amdgcn"])
        registers = count(r"\.vgpr_count:\s+(\d+)")
        spills = count(r"\.vgpr_spill_count:\s+(\d+)") + count(r"\.sgpr_spill_count:\s+(\d+)")
        size = len(made.asm["hsaco"])
    return Compiled(launch.kernel.__name__, target, registers, spills, made.metadata.shared, size)


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_kernels_compile_without_spills(shape: Shape, target: str) -> None:
    backend = TARGETS[target].backend
    for launch in launches(shape, backend == "hip"):
        made = compile_launch(launch, target)
        assert made.spills <= SPILLS, made
        assert made.shared <= SHARED[backend], made
        assert made.registers <= 255, made


def main() -> None:
    print("| step | kernel | target | registers | spills | shared | code |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for target in TARGETS:
            for launch in launches(shape, TARGETS[target].backend == "hip"):
                made = compile_launch(launch, target)
                print("|", " | ".join(map(str, (shape.name, *made))), "|", flush=True)


if __name__ == "__main__":
    main()
