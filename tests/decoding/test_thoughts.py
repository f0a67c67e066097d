"""Thoughts: found, kept apart from answers, and as a phase of every method."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import families
import revisit
from methods import decoding_cases
from revisit import Chain, ReVisiT, RevisitError, Trace
from revisit.decoding.decode import Decoded, decode
from revisit.decoding.settings import Decoding
from revisit.eval.engines.local import LocalEngine
from revisit.models.thoughts import Thoughts, find_thoughts

OPEN, CLOSE = "<think>", "</think>"
# Scripted text (T and A are words), whether the prompt ends within a thought, and which steps belong to a thought.
SCRIPTS = {
    "generated": ("<TT>AA", False, "011100"),
    "opened in the prompt": ("TT>AAA", True, "111000"),
    "unclosed": ("A<TTTT", False, "001111"),
    "unclosed in the prompt": ("TTTTTT", True, "111111"),
    "reopened": ("<T>A<T", False, "011001"),
    "without a thought": ("AAAAAA", False, "000000"),
}


@functools.cache
def thinking(family: str = "llava") -> tuple[Any, Any, Thoughts]:
    """Return a model, a processor with tokens for thoughts, and these tokens."""
    model, processor = families.build(family)
    processor = copy.deepcopy(processor)
    processor.tokenizer.add_tokens([OPEN, CLOSE])
    found = find_thoughts(processor.tokenizer, family)
    assert found is not None
    return model, processor, found


class Scripted(LogitsProcessor):
    """Keep the method's scores, and choose the scripted token of each row."""

    def __init__(self, scripts: list[list[int]], start: int) -> None:
        self.scripts, self.start, self.seen = scripts, start, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.seen.append(scores.clone())
        step = input_ids.shape[1] - self.start
        chosen = torch.full_like(scores, -torch.inf)
        chosen[range(len(scores)), [script[step] for script in self.scripts]] = 0.0
        return chosen


def prompts(names: list[str]) -> tuple[Any, list[list[int]], Thoughts]:
    """Return the inputs, the scripted tokens of each row, and the tokens of thoughts."""
    _, processor, thoughts = thinking()
    ids = {"<": thoughts.open, ">": thoughts.close, **{c: processor.tokenizer.convert_tokens_to_ids(c) for c in "TA"}}
    inputs = families.inputs("llava", ["hi"] * len(names), [[families.image(n)] for n in range(len(names))])
    last = [thoughts.open if SCRIPTS[name][1] else ids["A"] for name in names]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor(last)[:, None]], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs, [[ids[c] for c in SCRIPTS[name][0]] for name in names], thoughts


def run(method: Any, names: list[str], **kwargs: Any) -> tuple[list[Tensor], Any, Trace]:
    """Return the scores of the method at each step, transformers' output, and the trace."""
    model, processor, _ = thinking()
    inputs, scripts, _ = prompts(names)
    script, trace = Scripted(scripts, inputs["input_ids"].shape[1]), Trace(record=kwargs.pop("record", False))
    output = revisit.generate(
        model,
        **inputs,
        method=method,
        processor=processor,
        trace=trace,
        logits_processor=LogitsProcessorList([script]),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=families.VOCAB + 1,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return script.seen, output, trace


@pytest.mark.parametrize("phase", ["answer", "thought"])
@pytest.mark.parametrize("record", [False, True])
def test_a_method_acts_in_its_phase_only_in_every_row_of_a_batch(phase: str, record: bool) -> None:
    names = list(SCRIPTS)
    both, _, whole = run(ReVisiT(), names, record=record)
    scores, output, trace = run(ReVisiT(phase=phase), names, record=record)
    for row, name in enumerate(names):
        acts = [(mark == "1") == (phase == "thought") for mark in SCRIPTS[name][2]]
        for step, here in enumerate(acts):
            expected = both[step][row] if here else output.logits[step][row]
            torch.testing.assert_close(scores[step][row], expected, msg=f"{name}, step {step}")
            assert torch.equal(scores[step][row], output.logits[step][row]) != here
        counters = trace.rows[row]
        assert (counters.step_count, counters.outside) == (6, acts.count(False)), name
        assert counters.applied <= acts.count(True)
        if record:
            changed = [entry.base != entry.final for entry in counters.records]
            assert changed == [
                here and was.base != was.final for here, was in zip(acts, whole.rows[row].records, strict=True)
            ]


@pytest.mark.parametrize("name", sorted(decoding_cases.METHODS))
def test_every_method_leaves_the_logits_outside_its_phase_or_raises(name: str) -> None:
    method = decoding_cases.METHODS[name].replace(phase="answer")
    names = ["opened in the prompt", "unclosed"]
    if method.changes_forward:
        with pytest.raises(RevisitError, match="cannot be limited to the answer"):
            run(method, names)
        return
    scores, output, trace = run(method, names)
    for row, script in enumerate(names):
        for step, mark in enumerate(SCRIPTS[script][2]):
            if mark == "1":
                assert torch.equal(scores[step][row], output.logits[step][row])
    assert [row.outside for row in trace.rows] == [3, 4]


def test_links_of_a_chain_have_their_own_phases() -> None:
    method = Chain(["plausible_only:phase=answer", ReVisiT(phase="thought")])
    _, _, trace = run(method, ["generated"])
    assert [link.rows[0].outside for link in trace.links] == [3, 3]
    assert method.settings()["methods"][0]["phase"] == "answer"


def test_beams_are_limited_one_by_one() -> None:
    """Every beam has its own thoughts; the scripted ones write the same."""
    model, processor, _ = thinking()
    inputs, _, _ = prompts(["opened in the prompt"])
    trace = Trace()
    revisit.generate(
        model, **inputs, method=ReVisiT(phase="answer"), processor=processor, trace=trace, num_beams=3, max_new_tokens=3
    )
    assert all(row.outside == row.step_count == 3 for row in trace.rows)  # random weights do not close the thought


def test_speculation_has_phases() -> None:
    model, processor, thoughts = thinking()
    inputs, _, _ = prompts(["opened in the prompt"])
    options = {"method": ReVisiT(phase="answer"), "processor": processor, "max_new_tokens": 12}
    # A bias makes the model close its thought after a few tokens.
    options["sequence_bias"] = {(thoughts.close,): 6.0}
    plain, drafted = Trace(), Trace()
    tokens = revisit.generate(model, **inputs, trace=plain, **options).tolist()
    assert revisit.generate(model, **inputs, trace=drafted, assistant_model=model, **options).tolist() == tokens
    assert thoughts.close in tokens[0]
    assert 0 < plain.rows[0].outside < plain.rows[0].step_count
    assert drafted.rows == plain.rows


def test_a_model_without_thoughts_has_no_phases() -> None:
    model, processor = families.build("llava")
    inputs = families.inputs("llava", ["hi"], [[families.image(1)]])
    with pytest.raises(RevisitError, match="has no tokens <think>"):
        revisit.generate(model, **inputs, method="revisit:phase=answer", processor=processor, max_new_tokens=2)
    with pytest.raises(RevisitError, match=r"opera .* cannot be limited"):
        revisit.generate(model, **inputs, method="opera:phase=answer", processor=processor, max_new_tokens=2)


def test_phase_is_a_setting_only_where_it_is_set() -> None:
    assert "phase" not in revisit.ReVisiT().settings()
    assert revisit.methods.get("revisit", phase="answer").settings()["phase"] == "answer"
    with pytest.raises(RevisitError, match="phase"):
        ReVisiT(phase="question")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCRIPTS)
def test_answers_are_kept_apart_from_thoughts(name: str) -> None:
    model, processor, _ = thinking()
    inputs, scripts, _ = prompts([name])
    written, _, marks = SCRIPTS[name]
    thought = "".join(c for c, mark in zip(written, marks, strict=True) if mark == "1" and c in "TA")
    answer = "".join(c for c, mark in zip(written, marks, strict=True) if mark == "0" and c in "TA")
    unclosed = written.rfind("<") > written.rfind(">") or (SCRIPTS[name][1] and ">" not in written)
    script = Scripted(scripts, inputs["input_ids"].shape[1])
    settings = Decoding(max_new_tokens=6)
    (found,) = decode(model, processor, inputs, ReVisiT(), settings, processors=[script], record=True)
    assert (found.text, found.thought, found.unclosed) == (answer, thought, unclosed)
    assert found.counters().get("unclosed", 0) == unclosed
    assert "".join(step.text or "" for step in found.steps if not step.thought) == answer


def test_evaluation_stores_the_thought_and_scores_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from revisit.decoding.trace import RowTrace
    from revisit.eval.benchmarks.base import Item
    from revisit.eval.engines import local

    found = Decoded((1, 2), "yes", "it may be", True, "stop", Trace(rows=[RowTrace()]))
    monkeypatch.setattr(local, "decode_prompts", lambda *_: [found])
    engine = object.__new__(LocalEngine)
    engine.__dict__["loaded"] = (None, None)
    item = Item(id="1", prompt="?", images=())
    (answer,) = engine.answer(ReVisiT(), Decoding(), 0, [item], [[]])
    assert (answer.text, answer.thought, answer.counters["unclosed"]) == ("yes", "it may be", 1)
