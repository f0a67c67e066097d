"""`revisit eval --engine vllm` gives the answers of the local engine in float32. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import vllm_models
from vllm_worker import SETTINGS

import families
from revisit.decoding.settings import Decoding
from revisit.embedded.samples import SAMPLES
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.base import open_engine
from revisit.eval.engines.local import LocalEngine
from revisit.eval.engines.vllm import VllmEngine
from revisit.guard.rates import find_rate
from revisit.methods import get
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT

pytestmark = pytest.mark.timeout(3000)
DECODING = Decoding(max_new_tokens=6)


def test_answers_are_those_of_the_local_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REVISIT_VLLM", "1")
    model, processor = vllm_models.build("qwen2_5_vl")
    folder = vllm_models.save(model, processor, tmp_path / "model")
    items = []
    for i in range(6):
        path = tmp_path / f"{i}.png"
        families.image(i).save(path)
        items.append(Item(str(i), f"What is in image {i}?", (path,) if i % 3 else ()))
    batches = [items[:4], items[4:]]
    small = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    theirs = open_engine("vllm", str(folder), dtype="float32", **small)
    ours = LocalEngine(str(folder), dtype="float32")
    identity = theirs.identity(8, items)
    assert identity["fingerprint"] == ours.identity(8, items)["fingerprint"]
    assert (identity["device"], identity["dtype"], identity["batching"]) == ("cpu", "float32", None)
    for method in (Greedy(), ReVisiT(alpha=0.01)):
        found, wanted = (
            {a.id: (a.tokens, a.text) for part in engine.stream(method, DECODING, 0, batches) for a in part}
            for engine in (theirs, ours)
        )
        assert found == wanted
        assert len(found) == 6
    theirs.close()


def test_a_certified_floor_gives_the_answers_of_the_local_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    theirs = open_engine("vllm", "tiny", dtype="float32", enforce_eager=True, max_num_seqs=4)
    rate = find_rate(theirs.described, 0.2, None)
    method, decoding = rate.decoding_method(), Decoding(max_new_tokens=rate.max_new_tokens)
    assert rate.checked(*theirs.loaded, method, rate.prompt, rate.max_new_tokens) == rate.promise()
    items = []
    for name, sample in SAMPLES.items():
        path = tmp_path / f"{name}.png"
        sample.image().save(path)
        items.append(Item(name, rate.prompt, (path,)))
    found, wanted, free = (
        [answer.text for part in engine.stream(one, decoding, 0, [items]) for answer in part]
        for engine, one in ((theirs, method), (LocalEngine("tiny", dtype="float32"), method), (theirs, Greedy()))
    )
    assert found == wanted != free
    theirs.close()


def test_unsupported_methods_and_options_raise() -> None:
    engine = VllmEngine("tiny")
    with pytest.raises(RevisitError, match="not 'vcd'"):
        list(engine.stream(get("vcd"), DECODING, 0, []))
    with pytest.raises(RevisitError, match="does not support beam search"):
        list(engine.stream(ReVisiT(), Decoding(num_beams=2), 0, []))
    with pytest.raises(RevisitError, match="REVISIT_VLLM_LAYERS=all"):
        list(engine.stream(ReVisiT(layers="all"), DECODING, 0, []))
    unknown = VllmEngine("tiny")
    unknown.described = SimpleNamespace(config=SimpleNamespace(model_type="blip-2"))
    unknown.check(Greedy(), DECODING)
    with pytest.raises(RevisitError, match="does not support models of type blip-2"):
        unknown.check(ReVisiT(), DECODING)
    with pytest.raises(RevisitError, match="device-map"):
        VllmEngine("tiny", device_map="auto")
