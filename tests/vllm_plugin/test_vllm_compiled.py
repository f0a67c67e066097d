"""The plug-in with vLLM's compilation, whose cache outlives an engine. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import vllm_models
import vllm_worker
from test_vllm_engine import expected

pytestmark = pytest.mark.timeout(1800)
# Plain vLLM, the plug-in with different layers, and plain vLLM again: one process each, as servers are started.
STARTS: list[tuple[str, tuple[int, ...] | str | None]] = [
    ("plain", None),
    ("all", "all"),
    ("some", (1,)),
    ("again", None),
]


def test_engines_with_different_layers_share_a_compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model, processor = vllm_models.build("llava")
    vllm_models.save(model, processor, tmp_path / "model")
    runs: dict[str, Any] = {"family": "llava", "model": model, "processor": processor}
    options = {"max_num_seqs": 4, "enable_prefix_caching": False}
    engine = {
        "model": str(tmp_path / "model"),
        "place": vllm_models.PLACE["llava"],
        "compiled": True,
        "options": options,
    }
    answers = []
    for name, layers in STARTS:
        chosen = [None if layers is None else {"alpha": 1e-3, "layers": one} for one in ("last", layers)]
        requests = [
            {"text": f"\n{i} What can be seen?", "images": [i], "max_tokens": 6, "revisit": chosen[i % 2]}
            for i in range(4)
        ]
        kept = ",".join(map(str, layers)) if isinstance(layers, tuple) else layers or ""
        job = {**engine, "name": name, "requests": requests, "layers": kept}
        result = vllm_worker.run(tmp_path, name, [job], plugged=layers is not None)[0]
        answers.append([row["tokens"] for row in result["rows"]])
        assert answers[-1] == [expected(runs, request) for request in requests], name
    assert any((tmp_path / "cache").rglob("*"))  # it compiled
    assert len({str(answer) for answer in answers}) == 3
