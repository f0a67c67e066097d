"""`revisit eval --engine vllm`: the same jobs, the same answers as the local engine in float32. Run by `make test-vllm`."""

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
from revisit.errors import RevisitError
from revisit.evaluation.engines.base import BadImage, Job, open_engine
from revisit.evaluation.engines.local import LocalEngine
from revisit.evaluation.engines.vllm import VllmEngine
from revisit.evaluation.records import Answer
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
    jobs = []
    for i in range(6):
        path = tmp_path / f"{i}.png"
        families.picture(i).save(path)
        jobs.append(Job(str(i), f"What is in picture {i}?", (path,) if i % 3 else (), i))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    jobs.append(Job("bad", "What?", (tmp_path / "bad.png",), 0))
    small = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    theirs = open_engine("vllm", str(folder), dtype="float32", **small)
    ours = LocalEngine(str(folder), dtype="float32")
    assert theirs.identity()["fingerprint"] == ours.identity()["fingerprint"]
    assert theirs.identity() != ours.identity()
    for method in (Greedy(), ReVisiT(alpha=0.01)):
        found = {answer.id: answer for part in theirs.stream(method, DECODING, [jobs[:4], jobs[4:]]) for answer in part}
        wanted = {answer.id: answer for part in ours.stream(method, DECODING, [jobs[:4], jobs[4:]]) for answer in part}
        assert isinstance(found["bad"], BadImage)
        for name in map(str, range(6)):
            a, b = found[name], wanted[name]
            assert isinstance(a, Answer)
            assert isinstance(b, Answer)
            assert (a.tokens, a.text) == (b.tokens, b.text)
    theirs.close()


def test_what_vllm_cannot_do_is_said() -> None:
    engine = VllmEngine("tiny")
    with pytest.raises(RevisitError, match="not 'vcd'"):
        list(engine.stream(get("vcd"), DECODING, []))
    with pytest.raises(RevisitError, match="does not support beam search"):
        list(engine.stream(ReVisiT(), Decoding(num_beams=2), []))
    with pytest.raises(RevisitError, match="REVISIT_VLLM_LAYERS=all"):
        list(engine.stream(ReVisiT(layers="all"), DECODING, []))
    unknown = VllmEngine("tiny")
    unknown.about = SimpleNamespace(config=SimpleNamespace(model_type="blip-2"))
    unknown.refuse(Greedy(), DECODING)
    with pytest.raises(RevisitError, match="does not support models of type blip-2"):
        unknown.refuse(ReVisiT(), DECODING)
    with pytest.raises(RevisitError, match="device-map"):
        VllmEngine("tiny", device_map="auto")
