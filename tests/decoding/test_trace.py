"""Traces: content, display and files."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pandas
import pytest
import torch
from transformers.generation import utils as transformers_utils

import families
import revisit
from revisit import VCD, ReVisiT, Trace
from revisit.errors import RevisitError
from revisit.models import processors
from revisit.models.tokens import token_text

OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module")
def decoded() -> tuple[Any, Trace]:
    model, processor = families.build("llava")
    inputs = families.inputs("llava", ["What is it?", "And this?"], [[families.image(1)], [families.image(2)]])
    trace = Trace(record=True)
    output = revisit.generate(model, **inputs, method="revisit:alpha=1e-3", trace=trace, processor=processor, **OPTIONS)
    return output[:, inputs["input_ids"].shape[1] :], trace


def test_a_recorded_trace_has_the_tokens_of_the_output_and_their_text(decoded: tuple[Any, Trace]) -> None:
    (output, trace), (_, processor) = decoded, families.build("llava")
    assert [[record.token for record in row.records] for row in trace.rows] == output.tolist()
    assert (trace.method["name"], trace.method["alpha"]) == ("revisit", 1e-3)
    for row in trace.rows:
        text = processor.tokenizer.decode([record.token for record in row.records])
        assert "".join(str(record.text) for record in row.records) == text
        for record in row.records:
            assert record.texts == [token_text(processor.tokenizer, token) for token in record.ids]


def test_records_of_images_of_different_sizes_name_the_same_vision_tokens_as_alone() -> None:
    model, _ = families.build("qwen2_5_vl")
    images = [families.image(seed, size) for seed, size in ((1, (40, 32)), (2, (112, 84)))]

    def records(texts: list[str], chosen: list[Any]) -> list[Any]:
        trace = Trace(record=True)
        inputs = families.inputs("qwen2_5_vl", texts, [[image] for image in chosen])
        revisit.generate(model, **inputs, method=ReVisiT(alpha=1e-3, layers="all"), trace=trace, **OPTIONS)
        return [row.records for row in trace.rows]

    texts = ["What is it?", "And this?"]
    alone = [records([text], [image])[0] for text, image in zip(texts, images, strict=True)]
    assert alone[0][0].divergences.shape[1] < alone[1][0].divergences.shape[1]
    for together, single in zip(records(texts, images), alone, strict=True):
        assert [(r.layer, r.vision_token) for r in together] == [(r.layer, r.vision_token) for r in single]
        for one, other in zip(together, single, strict=True):
            torch.testing.assert_close(one.divergences, other.divergences, atol=1e-4, rtol=1e-4)


def test_records_have_text_if_the_model_has_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace names the method with the settings that were given."""
    model, processor = families.build("llava")
    monkeypatch.setattr(processors, "_PROCESSORS", WeakKeyDictionary())
    processors.keep_processor(model, processor)
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    trace = Trace(record=True)
    revisit.generate(model, **inputs, method="icd", trace=trace, **OPTIONS)
    assert trace.method == {"name": "icd", **revisit.ICD().settings()}
    assert all(record.text == processor.tokenizer.decode([record.token]) for record in trace.rows[0].records)


def test_save(decoded: tuple[Any, Trace], tmp_path: Path) -> None:
    trace = decoded[1]
    saved = json.loads(trace.save(tmp_path / "trace.json").read_text())
    assert saved["method"]["name"] == trace.method["name"]
    assert saved["summary"] == trace.summary()
    records = trace.rows[1].records
    assert any(record.divergences is not None for record in records)
    for before, after in zip(records, saved["rows"][1]["records"], strict=True):
        assert after["ids"] == before.ids
        assert after["final"] == before.final
        assert after["divergences"] == (None if before.divergences is None else before.divergences.tolist())


def test_a_record_of_one_candidate_still_shows_a_change() -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    trace = Trace(record=True, candidates=1)
    revisit.generate(
        model, **inputs, method=ReVisiT(alpha=1e-3, weight=3), trace=trace, max_new_tokens=12, do_sample=False
    )
    assert trace.rows[0].changed == sum(record.changed for record in trace.rows[0].records) > 0
    assert all(record.token == record.ids[0] for record in trace.rows[0].records)


def test_a_file_is_written_whole_and_without_nan(
    decoded: tuple[Any, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vision state that cannot be selected has the divergence NaN, which JSON does not have."""
    trace, file = copy.deepcopy(decoded[1]), tmp_path / "trace.json"
    record = next(record for record in trace.rows[0].records if record.divergences is not None)
    record.divergences[0, 0], record.weight = torch.nan, torch.inf
    trace.save(file)
    saved = json.loads(file.read_text(), parse_constant=pytest.fail)
    number = trace.rows[0].records.index(record)
    assert saved["rows"][0]["records"][number]["divergences"][0][0] is None
    assert saved["rows"][0]["records"][number]["weight"] is None

    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    before = file.read_bytes()
    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(RevisitError, match="No space left"):
        Trace().save(file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_chain_keeps_its_links() -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    trace = Trace()
    revisit.generate(model, **inputs, method="chain:methods=vcd,revisit", trace=trace, **OPTIONS)
    assert [link.method["name"] for link in trace.links] == ["vcd", "revisit"]
    assert [link["rows"][0]["step_count"] for link in trace.to_dict()["links"]] == [4, 4]
    assert trace.summary()["steps"] == 4


def test_the_table_of_steps(decoded: tuple[Any, Trace]) -> None:
    output, trace = decoded
    table = trace.to_pandas()
    assert table["token"].tolist() == output.flatten().tolist()
    assert table["row"].tolist() == [0] * 4 + [1] * 4
    assert table["step"].tolist() == [1, 2, 3, 4] * 2
    first = trace.rows[0].records[0]
    assert table.loc[0, "final"] == first.final[first.ids.index(first.token)]  # type: ignore[arg-type]
    assert table["changed"].tolist() == table["instead_of_token"].notna().tolist()
    records = [record for row in trace.rows for record in row.records]
    assert [None if pandas.isna(token) else token for token in table["instead_of_token"]] == [
        r.instead_of for r in records
    ]
    for column in ("token", "vision_token", "layer", "patch_row", "patch_col", "plausible_tokens"):
        assert pandas.api.types.is_integer_dtype(table[column]), column


def test_a_table_needs_records() -> None:
    with pytest.raises(RevisitError, match="counters only"):
        Trace().to_pandas()


def test_a_prompt_longer_than_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` and `check` agree on what is too long: a scaling factor of the rotary embeddings lifts the limit."""
    model, processor = families.build("llava")
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    config = model.config.get_text_config()
    monkeypatch.setattr(config, "max_position_embeddings", 8)

    def run() -> None:
        revisit.generate(model, **inputs, method="revisit", **OPTIONS)

    def check() -> None:
        revisit.check((model, processor), families.image(1), "a dog", prompt="what?")

    for rope in ({}, {"partial_rotary_factor": 0.5}, {"factor": 4.0}):
        monkeypatch.setattr(config, "rope_parameters", {**config.rope_parameters, **rope})
        for call in (run, check):
            with nullcontext() if "factor" in rope else pytest.raises(RevisitError, match="shorten the text"):
                call()


class Event:
    """A device's event on the CPU, where all work is done at once."""

    def __init__(self, device: torch.device, blocking: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("method", [ReVisiT(alpha=1e-2), VCD(), revisit.DoLa()], ids=["revisit", "vcd", "dola"])
@pytest.mark.parametrize("record", [False, True], ids=["counted", "recorded"])
def test_a_stop_that_is_noticed_one_step_late_counts_no_further_step(
    method: Any, record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Apple GPUs transformers reads whether all rows have ended one step later, and undoes that step."""
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["hi", "what is it?"], [[families.image(0)], [families.image(1)]])
    free = revisit.generate(
        model, **inputs, method=method, max_new_tokens=6, do_sample=False, eos_token_id=families.VOCAB
    )
    ends = free[:, inputs["input_ids"].shape[1] + 1].tolist()  # each row ends at its second token, or before

    def decode() -> tuple[Any, Trace, int]:
        trace, calls = Trace(record=record), []
        hook = model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
        out = revisit.generate(
            model, **inputs, method=method, trace=trace, max_new_tokens=6, do_sample=False, eos_token_id=ends,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        hook.remove()
        return out, trace, len(calls)

    at_once, known, calls = decode()
    monkeypatch.setattr(transformers_utils.DeferredStopCheck, "is_supported", staticmethod(lambda *_, **__: True))
    monkeypatch.setattr(transformers_utils.torch, "Event", Event)
    late, trace, more_calls = decode()
    assert more_calls > calls  # the further step was run
    assert late.sequences.tolist() == at_once.sequences.tolist()
    assert len(late.scores) == len(at_once.scores)
    assert trace.summary() == known.summary()
    for row, other in zip(trace.rows, known.rows, strict=True):
        assert row.plausible_tokens == other.plausible_tokens
        assert [step.token for step in row.records] == [step.token for step in other.records]
        assert all(step.token is not None for step in row.records)
