"""The compiled step equals the reference with and without cached columns, and is optional."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import random_cases
import torch

from revisit.models.head import LinearHead
from revisit.step import reference
from revisit.step.choice import choose
from revisit.step.compiled import kernel
from revisit.step.interface import ItemStates, PaddedStates, StepInput
from revisit.step.rule import Rule

built = pytest.mark.skipif(
    kernel.library() is None, reason="the compiled step was not built when the package was installed (no C compiler?)"
)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@built
@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("count", [1, 3, 4, 31, 32, 33, 130, 301])
@pytest.mark.parametrize("width", [1, 7, 8, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_that_do_not_divide_evenly(count: int, width: int, dtype: torch.dtype) -> None:
    """Take many steps with room for few columns, most of which are dropped and projected again, on one to three threads."""
    generator = torch.Generator().manual_seed(count * width)
    states = torch.randn(count, width, generator=generator).to(dtype)
    head, rule = LinearHead(torch.randn(300, width, generator=generator).to(dtype)), Rule(alpha=1e-2)
    steps = torch.randn(12, 1, 300, generator=generator) * torch.tensor([1, 2, 3] * 4)[:, None, None]
    runs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        step, rows = kernel.CompiledStep(head, rule), PaddedStates.of_items([states])
        rows.item(0).columns = kernel.Columns(ItemStates(states, 4 * 40 * count), 300)
        outputs = [step.take(StepInput(logits, rows)) for logits in steps]
        runs.append(torch.cat([output.scores for output in outputs]))
    fits = torch.cat([output.sizes for output in outputs]) <= 40  # torch computes larger sets
    assert fits.any()
    assert torch.equal(runs[0][fits], runs[1][fits])
    assert torch.equal(runs[0][fits], runs[2][fits])
    want = [random_cases.reference_scores(logits, [states], head, rule) for logits in steps]
    torch.testing.assert_close(runs[0], torch.cat(want), atol=2e-4, rtol=2e-4)


@built
def test_large_sets() -> None:
    """In a weak model, thousands of tokens are plausible."""
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(9, 8, generator=generator), LinearHead(torch.randn(20000, 8, generator=generator))
    logits, rule = torch.randn(1, 20000, generator=generator), Rule(alpha=0.015)
    rows = PaddedStates.of_items([states])
    got, expected = (
        kernel.CompiledStep(head, rule).take(StepInput(logits, rows)),
        reference.refine_row(logits[0], states, head, rule),
    )
    assert expected is not None
    assert 8192 < expected.size < kernel.COLUMNS
    columns = rows.item(0).columns
    assert columns is not None
    assert columns.slot_of.count_nonzero() == expected.size
    torch.testing.assert_close(got.scores[0], reference.scatter(expected, logits[0]), atol=2e-4, rtol=2e-4)


@built
def test_columns_are_projected_once_while_they_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(20, 8, generator=generator), LinearHead(torch.randn(300, 8, generator=generator))
    logits = torch.randn(1, 300, generator=generator) * 2
    step, rows = kernel.CompiledStep(head, Rule(alpha=1e-2)), PaddedStates.of_items([states])
    first = step.take(StepInput(logits, rows)).scores
    columns = rows.item(0).columns
    assert columns is not None
    held = columns.slot_of.nonzero().squeeze(-1)
    assert held.tolist() == (first[0] > -torch.inf).nonzero().squeeze(-1).tolist()
    slots = (columns.slot_of[held] - 1).long()
    torch.testing.assert_close(columns.store[slots], head.weight[held] @ states.T)
    columns.store[slots] *= 2  # shows in the scores, because columns in the cache are not projected again
    assert not torch.equal(step.take(StepInput(logits, rows)).scores, first)


@built
@pytest.mark.parametrize(
    ("rule", "dtype", "usual"),
    [
        (Rule(), torch.float32, True),
        (Rule(), torch.bfloat16, True),
        (Rule(), torch.float16, False),
        (Rule(select="max", neighbors=8, weight="agreement"), torch.float32, True),
        (Rule(select="soft"), torch.float32, False),
        (Rule(divergence="kl"), torch.float32, False),
        (Rule(fusion="interpolation"), torch.float32, False),
        (Rule(normalize=False), torch.float32, True),
    ],
)
def test_supported_settings(rule: Rule, dtype: torch.dtype, usual: bool) -> None:
    head = LinearHead(torch.zeros(9, 4, dtype=dtype))
    assert choose(head, rule, torch.device("cpu")).name == ("compiled" if usual else "torch")


def test_exact_settings_use_the_reference() -> None:
    head, cpu, gpu = LinearHead(torch.zeros(9, 4)), torch.device("cpu"), torch.device("cuda")
    assert choose(head, Rule(vocabulary="full"), gpu).name == "reference"
    assert choose(head, Rule(precision="model"), cpu).name == "reference"
    assert choose(head, Rule(precision="model"), gpu).name == "torch"


# -- without it ---------------------------------------------------------------------------------------------------

CODE = """
import sys, warnings
from pathlib import Path
import torch
from revisit.models.head import LinearHead
from revisit.step.choice import choose
from revisit.step.compiled import kernel
from revisit.step.rule import Rule
from revisit.step.interface import PaddedStates, StepInput
kernel.HERE = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        step = choose(LinearHead(torch.randn(9, 4)), Rule(), torch.device("cpu"))
        assert step.take(StepInput(torch.randn(1, 9), PaddedStates.of_items([torch.randn(3, 4)]))).applied.all()
print(type(step).__name__, len(caught), *(str(w.message) for w in caught))
"""


def run_with(folder: Path, **environment: str) -> str:
    command = [sys.executable, "-c", CODE, str(folder)]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the library and its source, and return the path of the library."""
    shutil.copy(Path(kernel.__file__).with_name("kernel.c"), tmp_path)
    return Path(shutil.copy(kernel.library()._name, tmp_path))


@built
def test_it_is_used_unless_switched_off(copied: Path) -> None:
    assert run_with(copied.parent) == "CompiledStep 0"
    assert run_with(copied.parent, REVISIT_KERNEL="0") == "BatchedStep 0"


def test_a_missing_library_gives_no_warning(tmp_path: Path) -> None:
    assert run_with(tmp_path) == "BatchedStep 0"


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda library: library.write_bytes(change(library.read_bytes()))


def _other_source(library: Path) -> None:
    source = library.with_name("kernel.c")
    source.write_text(source.read_text() + "/* changed */")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": _changed(lambda data: b""),
    "foreign": _changed(lambda data: b"MZ" + data[2:]),
    "no libgomp": _changed(lambda data: data.replace(b"libgomp.so.1", b"libgonp.so.1")),
    "of another source": _other_source,
    "without source": lambda library: library.with_name("kernel.c").unlink(),
}


@built
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_gives_one_warning_and_torch(copied: Path, damage: str) -> None:
    DAMAGE[damage](copied)
    assert damage != "no libgomp" or b"libgonp" in copied.read_bytes()
    printed = run_with(copied.parent)
    assert printed.startswith("BatchedStep 1 The compiled step of revisit cannot be used (")
    assert "reinstall the package" in printed
