"""Compare fast implementations with the reference on random steps with every edge case that the reference defines.

    python tests/step/random_cases.py --cases 200000 [--seed 0] [--backend batched --backend cached]
    TRITON_INTERPRET=1 python tests/step/random_cases.py --cases 500 --backend triton

Prints the number of rows of each outcome. "equal": the same vision token was selected, and scores are equal up to rounding.
"unchanged": both left the row unchanged. "near tie": another vision token was selected whose divergence equals that of the
reference's choice up to rounding, and the scores are those of that token (with several tokens: between those of any such choice).
"not supported": by the backend. "different": a difference, listed with its seed; `--cases 1 --seed S` repeats it.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.models.head import LinearHead
from revisit.step import reference
from revisit.step.batched import BatchedStep
from revisit.step.cached import CachedStep
from revisit.step.interface import RESOLUTION, RowDetail, RowStates, StepInput, StepOutput
from revisit.step.rule import SELECTIONS_WITHOUT_COUNT, Rule

SCORES = 1e-5  # of the sum of the absolute numbers that are added up: by how much scores may differ
DIVERGENCES = 1e-6  # of the same for the logits: by how much divergences may differ

Take = Callable[["Case"], StepOutput | None]


@dataclass(frozen=True)
class Case:
    """One step of a small batch."""

    logits: Tensor  # (B, V)
    items: list[Tensor]  # (n, d) each
    head: LinearHead
    rule: Rule
    rows_per_item: int
    uniform: float
    written: Tensor  # (B, n)


def draw(seed: int) -> Case:
    """Draw the case of a seed."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocabulary, width = dice.choice([1, 2, 3, 7, 50, 400]), dice.choice([1, 3, 8, 33])
    rows_per_item, dtype = dice.choice([1, 1, 2]), dice.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16])
    items = [_states(dice, generator, width) for _ in range(dice.choice([1, 1, 2, 3]))]
    weight = torch.randn(vocabulary, width, generator=generator) * dice.choice([0.1, 1, 1, 3])
    if dice.random() < 0.1:
        weight[dice.randrange(vocabulary)] = dice.choice([math.nan, math.inf, 1e19, 1e30, 0.0])
    logits = torch.stack([_logits(dice, generator, vocabulary) for _ in range(len(items) * rows_per_item)])
    head = LinearHead(weight.to(dtype), transform=torch.tanh if dice.random() < 0.05 else None)
    rule, uniform = _rule(dice), dice.random()
    rule = rule.replace(once=dice.choice([0.0, 0.4, 1.0]))
    written = torch.randint(-1, vocabulary, (len(logits), dice.choice([0, 1, 5, 40])), generator=generator)
    written[:, ::3] = logits.nan_to_num(0).argmax(-1, keepdim=True)  # the likeliest token, several times
    return Case(logits, [item.to(dtype) for item in items], head, rule, rows_per_item, uniform, written)


def batch(items: int = 3, rows_per_item: int = 1, width: int = 16) -> tuple[Tensor, list[Tensor], LinearHead]:
    """Return logits, states of different length and a head, for tests of one property."""
    generator = torch.Generator().manual_seed(items)
    states = [torch.randn(5 + 7 * number, width, generator=generator) for number in range(items)]
    head = LinearHead(torch.randn(300, width, generator=generator))
    return torch.randn(items * rows_per_item, 300, generator=generator) * 2, states, head


def reference_scores(
    logits: Tensor, states: list[Tensor], head: LinearHead, rule: Rule, written: Tensor | None = None
) -> Tensor:
    """Return the reference's scores of all rows; consecutive rows belong to one item.  -> (B, V)"""
    padded = RowStates.of_items(states, len(logits) // len(states))
    return reference.ReferenceStep(head, rule).take(StepInput(logits, padded, written=written)).scores


def _rule(dice: random.Random) -> Rule:
    usual = Rule(alpha=dice.choice([1e-5, 1e-3, 0.1]), select=dice.choice(["min", "min", "max"]))
    if dice.random() < 0.5:
        weight = dice.choice([1.0, 1.0, 0.5, 0.0, 3.0, "agreement", "uncertainty", "both"])
        return usual.replace(weight=weight, neighbors=dice.choice([1, 1, 1, 2, 8]))
    fusion = dice.choice(["poe", "interpolation"])
    select, neighbors = dice.choice(["min", "max", "random", "soft"]), dice.choice([1, 1, 3])
    return Rule(
        alpha=dice.choice([1.0, 0.5, 1e-2, 1e-5, 1e-30]),
        divergence=dice.choice(["jsd", "official", "kl", "cosine"]),
        select=select,
        fusion=fusion,
        weight=dice.choice([0.0, 0.3, 1.0, "agreement", "both"]),
        neighbors=1 if select in SELECTIONS_WITHOUT_COUNT else neighbors,
        vocabulary="full" if dice.random() < 0.2 else "subset",
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


def batched(case: Case) -> StepOutput | None:
    """Take one step of all rows at once in torch."""
    if not case.rule.usual:
        return None
    states = RowStates.of_items(case.items, case.rows_per_item)
    return BatchedStep(case.head, case.rule).take(StepInput(case.logits, states, case.uniform, written=case.written))


def cached(case: Case) -> StepOutput:
    """Take two steps row by row, the second with cached columns."""
    step, states = CachedStep(case.head, case.rule), RowStates.of_items(case.items, case.rows_per_item)
    step.take(StepInput(case.logits.flip(0), states))
    return step.take(StepInput(case.logits, states, case.uniform, written=case.written))


def interpreted(case: Case) -> StepOutput | None:
    """Run Triton's kernels in its interpreter (TRITON_INTERPRET=1), every other case with the smallest tiles."""
    from revisit.step import triton

    if not case.rule.usual or case.head.plain_weight is None:
        return None
    step, states = triton.TritonStep(case.head, case.rule), RowStates.of_items(case.items, case.rows_per_item)
    small = triton.Tiles(16, warps=4, width=16, stages=1, tokens=16, vocabulary=64, projections=2, projected=16)
    tiles = small if len(case.logits) % 2 else triton.tiles_for(len(states), states.longest, states.states.dtype)
    return step.launch(case.logits, states, torch.empty_like(case.logits), tiles, written=case.written)


BACKENDS: dict[str, Take] = {"batched": batched, "cached": cached, "triton": interpreted}


def compare(case: Case, step: StepOutput) -> list[str]:
    """Compare each row with the reference: "equal", "near tie", or a sentence about a difference."""
    return [_compare_row(case, step, row) for row in range(len(case.logits))]


def _compare_row(case: Case, step: StepOutput, row: int) -> str:
    logits, states, rule = case.logits[row], case.items[row // case.rows_per_item], case.rule
    expected = reference.refine_row(logits, states, case.head, rule, case.uniform, case.written[row])
    got = step.scores[row]
    if expected is None:
        same = torch.equal(got.nan_to_num(7.0), logits.nan_to_num(7.0)) and not bool(step.applied[row])
        return "unchanged" if same else "a row was changed that should be left unchanged"
    if int(step.sizes[row]) != expected.size or bool(step.applied[row]) != expected.applied:
        return f"size {int(step.sizes[row])} for {expected.size}, applied {bool(step.applied[row])}"
    if not torch.equal(got > -math.inf, reference.scatter(expected, logits) > -math.inf):
        return "another set"
    if not expected.applied:
        difference = _difference(got[expected.ids], expected.final, rule)
        return "equal" if difference <= SCORES * _largest(expected.base) else f"scores differ by {difference:.3g}"
    assert expected.divergences is not None
    chosen, shares = reference.select(expected.divergences, expected.size, rule, case.uniform)
    state, weight = int(step.states[row]), torch.as_tensor(step.weights).expand(len(step.scores))[row]
    if rule.select in ("random", "soft") or rule.neighbors > 1 or state == expected.state:
        outcome = _compare_scores(case, expected, row, got, states[chosen], shares, weight)
        if (
            rule.neighbors > 1
            and outcome != "equal"
            and _among_near_ties(case, expected, row, got, states, chosen, weight)
        ):
            return "near tie"
        scores = got[expected.ids]
        changed = bool(expected.base[scores.argmax()] < expected.base.max())
        tied = int((scores == scores.max()).sum()) > 1  # then any of them may count as the likeliest
        return outcome if bool(step.changed[row]) == changed or tied else "another change was counted"
    if not bool(_near(case, expected, states, expected.state)[state]):
        return f"state {state} for {expected.state}, which is nearer"
    alone = reference.refine_row(logits, states[state : state + 1], case.head, rule, written=case.written[row])
    assert alone is not None
    outcome = _compare_scores(case, alone, row, got, states[state : state + 1], shares, weight)
    return "near tie" if outcome == "equal" else outcome


def _scale(case: Case, expected: RowDetail, values: Tensor) -> Tensor:
    """Return the scale of divergences: rounding of the logits changes them by about as much, times that rounding."""
    scales = {"official": 1 / expected.size + values.abs(), "kl": 1 + values.abs()}
    return scales.get(case.rule.divergence, torch.tensor(1.0))


def _compare_scores(
    case: Case, expected: RowDetail, row: int, got: Tensor, states: Tensor, shares: Tensor, weight: Tensor
) -> str:
    """Compare scores, which may differ by rounding: by `SCORES` of the absolute numbers that are added up, with the weight of the step.

    A weight may differ by 1e-5, by `DIVERGENCES` of the numbers that a logit is the sum of, or its square by 1e-6: "uncertainty" is
    a root, which makes much of rounding near zero.
    """
    rule, used = case.rule, float(weight)
    rounding = 1e-5 + DIVERGENCES * float(shares.double() @ _summands(case, states, expected.ids))
    if abs(used - expected.weight) > rounding and abs(used**2 - expected.weight**2) > 1e-6:
        return f"weight {used} for {expected.weight}"
    limit = _limit(case, expected, states, shares)
    final = _fuse(case, expected, expected.vision, weight, row)
    if rule.normalize:
        final = final.log_softmax(-1)
    difference = _difference(got[expected.ids], final, rule)
    return "equal" if difference <= limit else f"scores differ by {difference:.3g} (limit {limit:.3g})"


def _limit(case: Case, expected: RowDetail, states: Tensor, shares: Tensor) -> float:
    x = _summands(case, states, expected.ids)
    weight = case.rule.weight if isinstance(case.rule.weight, float) else 1.0
    return SCORES * (_largest(expected.base) + weight * float(shares.double() @ x))


def _near(case: Case, expected: RowDetail, states: Tensor, state: int) -> Tensor:
    """Return which vision tokens' divergences are so near to this one's that either may be selected.  -> (n,)

    Nearer than the reference rounds them, and `DIVERGENCES` of the logits that they are computed from.
    """
    assert expected.divergences is not None
    values, logits = expected.divergences, _summands(case, states, expected.ids)
    step = RESOLUTION + DIVERGENCES * torch.maximum(logits, logits[state])
    return (values - values[state]).abs() <= step * _scale(case, expected, values[state])


def _fuse(case: Case, expected: RowDetail, log_q: Tensor, weight: Tensor, row: int) -> Tensor:
    """Return the scores before normalization of the reference with another Q or weight."""
    fused = reference.fuse(expected.base, log_q, case.rule.fusion, weight)
    written = torch.isin(expected.ids, case.written[row])
    return reference.limit(expected.base, fused, written, case.rule.once)


def _among_near_ties(
    case: Case, expected: RowDetail, row: int, got: Tensor, states: Tensor, chosen: Tensor, weight: Tensor
) -> bool:
    """Return whether each score is within the range that any choice among the nearest vision tokens gives."""
    near = _near(case, expected, states, int(chosen[-1]))
    log_q = reference.log_softmax(case.head.logits(states, expected.ids), False)  # (n, k)
    certain = log_q[[int(state) for state in chosen if not near[state]]]
    free, ranked = len(chosen) - len(certain), log_q[near].sort(0).values
    ends = [torch.cat([certain, rest]).logsumexp(0) - math.log(len(chosen)) for rest in (ranked[:free], ranked[-free:])]
    low, high = (_fuse(case, expected, mean, weight, row) for mean in ends)
    if case.rule.normalize:
        low, high = low - high.logsumexp(-1), high - low.logsumexp(-1)
    limit = _limit(case, expected, states[chosen], torch.full((len(chosen),), 1 / len(chosen)))
    scores = got[expected.ids]
    return bool(((low - limit <= scores) & (scores <= high + limit)).all())


def _summands(case: Case, states: Tensor, ids: Tensor) -> Tensor:
    """Return for each vision token the largest sum, over its logits, of the absolute terms that a logit is the sum of.  -> (n,)"""
    return (states.double().abs() @ case.head.weight[ids].double().abs().mT).amax(-1)


def _largest(log_p: Tensor) -> float:
    return 1 + float(log_p.abs().max())


def _difference(got: Tensor, expected: Tensor, rule: Rule) -> float:
    """Return the largest difference of scores, or of probabilities where a weight of 0 and of 1e-8 differ by a logarithm."""
    if rule.fusion == "interpolation":
        return float((got.exp() - expected.exp()).abs().max())
    return float(torch.where(got == expected, 0.0, (got - expected).abs()).max())


GOOD = ("equal", "near tie", "unchanged", "not supported")


@torch.no_grad()
def run(seeds: range, backend: str) -> tuple[collections.Counter[str], list[str]]:
    """Return the counts of outcomes over these seeds, and the first differences."""
    counts: collections.Counter[str] = collections.Counter()
    differences: list[str] = []
    for seed in seeds:
        case = draw(seed)
        step = BACKENDS[backend](case)
        for row, outcome in enumerate(["not supported"] if step is None else compare(case, step)):
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
    for backend in arguments.backend or ["batched", "cached"]:
        counts, differences = run(range(arguments.seed, arguments.seed + arguments.cases), backend)
        summary = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        print(f"{backend}: {arguments.cases} cases, {sum(counts.values())} rows: {summary}")
        print("".join(f"  {difference}\n" for difference in differences), end="")
        failed |= bool(differences)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
