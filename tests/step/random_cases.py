"""Random steps, ordinary ones and every corner that the reference defines, taken by a fast backend and by the reference.

    python tests/step/random_cases.py --cases 200000 [--seed 0] [--backend batched --backend compiled]

Prints how many rows were compared and how each came out. A row whose selected vision token differs is explained only if
the reference itself puts the two divergences within rounding of each other; the scores must then be those of that token.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from revisit.models.head import LinearHead
from revisit.step import reference
from revisit.step.batched import Step, refine
from revisit.step.compiled import kernel
from revisit.step.rule import RESOLUTION, Rule
from revisit.step.states import StateBlocks

Take = Callable[["Case"], Step | None]


@dataclass(frozen=True)
class Case:
    """The step of a small batch."""

    logits: Tensor  # (B, V)
    items: list[Tensor]  # (n, d) each
    head: LinearHead
    rule: Rule
    copies: int
    uniform: float


def draw(seed: int) -> Case:
    """The case of a seed."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocabulary, width = dice.choice([1, 2, 3, 7, 50, 400]), dice.choice([1, 3, 8, 33])
    copies, dtype = dice.choice([1, 1, 2]), dice.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16])
    items = [_states(dice, generator, width) for _ in range(dice.choice([1, 1, 2, 3]))]
    weight = torch.randn(vocabulary, width, generator=generator) * dice.choice([0.1, 1, 1, 3])
    if dice.random() < 0.1:
        weight[dice.randrange(vocabulary)] = dice.choice([math.nan, math.inf, 1e19, 1e30, 0.0])
    logits = torch.stack([_logits(dice, generator, vocabulary) for _ in range(len(items) * copies)])
    head = LinearHead(weight.to(dtype), transform=torch.tanh if dice.random() < 0.05 else None)
    return Case(logits, [item.to(dtype) for item in items], head, _rule(dice), copies, dice.random())


def _rule(dice: random.Random) -> Rule:
    usual = Rule(alpha=dice.choice([1e-5, 1e-3, 0.1]), select=dice.choice(["min", "min", "max"]))
    if dice.random() < 0.5:
        weight = dice.choice([1.0, 1.0, 0.5, 0.0, 3.0, "agreement", "uncertainty", "both"])
        return replace(usual, weight=weight, neighbors=dice.choice([1, 1, 1, 2, 8]))
    fusion = dice.choice(["poe", "interpolation"])
    return Rule(
        alpha=dice.choice([1.0, 0.5, 1e-2, 1e-5, 1e-30]),
        divergence=dice.choice(["jsd", "official", "kl", "cosine"]),
        select=dice.choice(["min", "max", "random", "soft"]),
        fusion=fusion,
        weight=dice.choice([0.0, 0.3, 1.0, "agreement", "both"]),
        neighbors=dice.choice([1, 1, 3]),
        full_vocabulary=dice.random() < 0.2,
        normalize=dice.random() < 0.7,
    )


def _logits(dice: random.Random, generator: torch.Generator, size: int) -> Tensor:
    logits = torch.randn(size, generator=generator) * dice.choice([0.1, 1, 2, 4, 30, 1e4]) + dice.choice(
        [0, 0, 5, -500]
    )
    kind = dice.choice(["plain"] * 8 + ["banned", "nothing", "nan", "inf", "ties", "threshold", "huge", "single"])
    if kind == "banned":
        logits[torch.rand(size, generator=generator) < 0.5] = -math.inf
    elif kind == "nothing":
        logits[:] = -math.inf
    elif kind in ("nan", "inf"):
        logits[dice.randrange(size)] = math.nan if kind == "nan" else math.inf
    elif kind == "ties":
        logits = logits.round()
    elif kind == "threshold":
        logits[dice.randrange(size)] = logits.max() + math.log(dice.choice([1e-5, 1e-3, 0.1]))
    elif kind == "huge":
        logits *= 1e34
    elif kind == "single":
        logits[dice.randrange(size)] = logits.max() + 100
    return logits


def _states(dice: random.Random, generator: torch.Generator, width: int) -> Tensor:
    count = dice.choice([0, 1, 2, 5, 40, 40])
    states = torch.randn(count, width, generator=generator) * dice.choice([0.3, 1, 1, 4])
    if not count:
        return states
    kind = dice.choice(["plain"] * 8 + ["equal", "pairs", "zero", "bad", "all bad", "huge", "overflow", "alike"])
    place = dice.randrange(count)
    if kind == "equal":
        states = states[:1].repeat(count, 1)
    elif kind == "pairs":
        states[count // 2 :] = states[: count - count // 2].clone()
    elif kind == "zero":
        states[place] = 0
    elif kind == "bad":
        states[place, dice.randrange(width)] = dice.choice([math.nan, math.inf, -math.inf])
    elif kind == "all bad":
        states[:] = dice.choice([math.nan, math.inf])
    elif kind == "huge":
        states[place:] *= dice.choice([1e10, 1e19, 1e37])
    elif kind == "overflow":
        states *= 1e38
    elif kind == "alike":
        states = states[:1] + 1e-4 * states
    return states


def batched(case: Case) -> Step:
    """All rows at once, with places for exactly the largest set."""
    blocks = StateBlocks.of_items(case.items, case.copies)
    return refine(case.logits, blocks, case.head, case.rule, uniform=case.uniform)


def spacious(case: Case) -> Step:
    """All rows at once, with places for the whole vocabulary, as with a capacity on a GPU."""
    blocks = StateBlocks.of_items(case.items, case.copies)
    capacity = case.logits.shape[1]
    return refine(case.logits, blocks, case.head, case.rule, uniform=case.uniform, capacity=capacity)


def compiled(case: Case) -> Step | None:
    """Row by row in C, in two steps of which the second finds some columns kept; None where it does not take the case."""
    items = [item.float() for item in case.items]
    head = LinearHead(case.head.weight.float(), transform=case.head.transform)
    if not kernel.suits(items[0], head, case.rule):
        return None
    step = kernel.CompiledStep(items, head, case.rule, case.copies)
    step(case.logits.flip(0))
    return step(case.logits)


BACKENDS: dict[str, Take] = {"batched": batched, "spacious": spacious, "compiled": compiled}


def compare(case: Case, step: Step) -> list[str]:
    """How each row came out: "equal", "near tie", or a sentence about a difference."""
    return [_compare_row(case, step, row) for row in range(len(case.logits))]


def _compare_row(case: Case, step: Step, row: int) -> str:
    logits, states, rule = case.logits[row], case.items[row // case.copies], case.rule
    expected = reference.refine(logits, states, case.head, rule, case.uniform)
    got = step.scores[row]
    if expected is None:
        same = torch.equal(got.nan_to_num(7.0), logits.nan_to_num(7.0)) and not bool(step.applied[row])
        return "left as it is" if same else "a row was changed that should be left as it is"
    if int(step.sizes[row]) != expected.size or bool(step.applied[row]) != expected.applied:
        return f"size {int(step.sizes[row])} for {expected.size}, applied {bool(step.applied[row])}"
    if not torch.equal(got > -math.inf, reference.scatter(expected, logits) > -math.inf):
        return "another set"
    tolerance = 1e-5
    if expected.applied:
        x = case.head.logits(states[expected.state : expected.state + 1], expected.ids).abs()
        tolerance = 1e-5 * (1 + float(x.max()))
    if expected.applied and int(step.states[row]) != expected.state and rule.neighbors == 1 and rule.select != "soft":
        return _near_tie(case, expected, row, int(step.states[row]), got, tolerance)
    difference = _apart(got[expected.ids], expected.final, rule)
    strength = 1 + (rule.weight if isinstance(rule.weight, float) else 1)
    limit = tolerance * strength * (1 + float(expected.final.abs().nan_to_num(0, 0, 0).max()))
    if rule.neighbors > 1 or rule.select == "soft" or isinstance(rule.weight, str):
        limit *= 20
    if float(difference) <= limit:
        return "equal"
    if rule.neighbors > 1 and expected.divergences is not None and rule.neighbors < len(expected.divergences):
        ranked = expected.divergences.sort(descending=rule.select == "max").values
        gap = abs(float(ranked[rule.neighbors] - ranked[rule.neighbors - 1]))
        if gap <= (4 * RESOLUTION + 0.3 * tolerance) * (1 + abs(float(ranked[0]))):
            return "near tie"  # which of two is the last of the nearest
    return f"scores differ by {float(difference):.3g} (limit {limit:.3g})"


def _near_tie(case: Case, expected: reference.Refinement, row: int, state: int, got: Tensor, tolerance: float) -> str:
    """Another vision token than the reference's: only where float32 cannot tell their divergences apart."""
    assert expected.divergences is not None
    mine, best = float(expected.divergences[state]), float(expected.divergences[expected.state])
    scale = 1 / expected.size if case.rule.divergence == "official" else 1.0
    if not abs(mine - best) <= (4 * RESOLUTION + 0.3 * tolerance) * (scale + abs(best)):
        return f"state {state} (divergence {mine}) for {expected.state} ({best})"
    alone = reference.refine(
        case.logits[row], case.items[row // case.copies][state : state + 1], case.head, replace(case.rule, select="min")
    )
    assert alone is not None
    difference = _apart(got[alone.ids], alone.final, case.rule)
    limit = 20 * tolerance * (1 + float(alone.final.abs().nan_to_num(0, 0, 0).max()))
    return "near tie" if float(difference) <= limit else f"scores of the chosen state differ by {float(difference):.3g}"


def _apart(got: Tensor, expected: Tensor, rule: Rule) -> Tensor:
    """The largest difference of scores, or of probabilities where a weight of 0 and of 1e-8 differ by a logarithm."""
    if rule.fusion == "interpolation":
        return (got.exp() - expected.exp()).abs().max()
    return (got - expected).abs().nan_to_num(0).max()


GOOD = ("equal", "near tie", "left as it is", "not taken")


@torch.no_grad()
def run(seeds: range, backend: str) -> tuple[collections.Counter[str], list[str]]:
    """Counts of outcomes over these seeds, and the first differences."""
    counts: collections.Counter[str] = collections.Counter()
    differences: list[str] = []
    for seed in seeds:
        case = draw(seed)
        step = BACKENDS[backend](case)
        for row, outcome in enumerate(["not taken"] if step is None else compare(case, step)):
            counts[outcome if outcome in GOOD else "different"] += 1
            if outcome not in GOOD and len(differences) < 20:
                differences.append(f"seed {seed}, row {row}: {outcome}; {case.rule}")
    return counts, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--backend", action="append", choices=list(BACKENDS), default=None)
    arguments = parser.parse_args()
    failed = False
    for backend in arguments.backend or BACKENDS:
        counts, differences = run(range(arguments.seed, arguments.seed + arguments.cases), backend)
        told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        print(f"{backend}: {arguments.cases} cases, {sum(counts.values())} rows: {told}")
        print("".join(f"  {difference}\n" for difference in differences), end="")
        failed |= bool(differences)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
