"""vLLM's OpenAI-compatible server with the plug-in and the official client. Run by `make test-vllm`."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import openai
import vllm_models
from vllm_breaker import BREAKS
from vllm_worker import SETTINGS

import families
from revisit import ReVisiT, generate
from revisit.cli import engine_doctor
from revisit.cli.checkup import status

pytestmark = pytest.mark.timeout(3000)
TEXT = "What is this?"
RECOMMENDED = {"alpha": 1e-2, "fusion": "interpolation", "weight": 0.3}  # by the model, in its generation_config.json


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start the api_server module in its own process (the `vllm` command of the CPU build cannot)."""
    folder = tmp_path_factory.mktemp("served")
    model, processor = vllm_models.build("llava")
    model.generation_config.revisit = RECOMMENDED
    model.generation_config._from_model_config = False  # else transformers reads nothing of it that it does not know
    vllm_models.save(model, processor, folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    command += ["--worker-extension-cls", "vllm_breaker.Breaker"]
    environment = {**os.environ, **SETTINGS, "REVISIT_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["REVISIT_VLLM_POOL_MB"] = "0.07"  # four blocks of 64 states: sixteen images
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
        yield {"url": str(client.base_url), "client": client, "model": model, "processor": processor}
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 1800
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError("the server was not ready in time")


def ask(server: dict[str, Any], xargs: dict[str, Any] | None, seed: int = 1, images: int = 1) -> list[int]:
    """Return the token ids of an answer about an image, or about several copies of it."""
    buffer = io.BytesIO()
    families.image(seed).save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [*[{"type": "image_url", "image_url": {"url": uri}}] * images, {"type": "text", "text": TEXT}]
    answer = server["client"].chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=10,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **({"vllm_xargs": xargs} if xargs else {})},
    )
    return list(answer.choices[0].token_ids)


def expected(server: dict[str, Any], method: Any, seed: int = 1) -> list[int]:
    image = families.image(seed)
    inputs = server["processor"](text=[f"<image>\n{TEXT}"], images=[[image]], return_tensors="pt")
    output = generate(server["model"], **inputs, method=method, max_new_tokens=10, do_sample=False, eos_token_id=None)
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


REFINED = ReVisiT(**{**RECOMMENDED, "alpha": 1e-3})  # with the settings {"alpha": 1e-3}


def test_the_official_client_opts_in_and_out_per_request(server: dict[str, Any]) -> None:
    for settings in ({"alpha": 1e-3}, {"alpha": 0.1, "divergence": "official"}):
        method = ReVisiT(**{**RECOMMENDED, **settings})
        assert ask(server, {"revisit": json.dumps(settings)}) == expected(server, method)
    assert ask(server, None) == expected(server, "greedy") != expected(server, REFINED)
    assert expected(server, ReVisiT(), seed=2) != expected(server, ReVisiT(**RECOMMENDED), seed=2)
    for yes in (True, 1, "revisit"):
        assert ask(server, {"revisit": yes}, seed=2) == expected(server, ReVisiT(**RECOMMENDED), seed=2)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ('{"alhpa": 1}', "Did you mean 'alpha'"),
        ("{", "not JSON"),
        ({"alpha": 1e-3}, "vllm_xargs"),  # vLLM's schema allows no mapping, only a JSON string
    ],
)
def test_bad_settings_are_a_400_and_the_server_stays_up(server: dict[str, Any], value: Any, part: str) -> None:
    with pytest.raises(openai.BadRequestError, match=part):
        ask(server, {"revisit": value})
    assert ask(server, {"revisit": '{"alpha": 1e-3}'}) == expected(server, REFINED)


def test_beam_search_with_revisit_is_a_400(server: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "n": 2}
    for more in ({}, {"vllm_xargs": {"revisit": 1}}):
        with pytest.raises(openai.BadRequestError, match="beam search") if more else nullcontext():
            server["client"].chat.completions.create(**asked, extra_body={"use_beam_search": True, **more})


def test_images_that_can_never_fit_are_a_400_while_others_finish(server: dict[str, Any]) -> None:
    settings = {"revisit": '{"alpha": 1e-3}'}
    with ThreadPoolExecutor(24) as pool:
        others = [pool.submit(ask, server, settings, seed=i % 5) for i in range(20)]
        large = pool.submit(ask, server, settings, images=17)
        plain = pool.submit(ask, server, None, images=17)
        with pytest.raises(openai.BadRequestError, match="272 states"):
            large.result()
        assert len(plain.result()) == 10  # without ReVisiT the same images are accepted
        for i, other in enumerate(others):
            assert other.result() == expected(server, REFINED, seed=i % 5)


def test_an_error_in_one_request_leaves_the_engine_alive(server: dict[str, Any]) -> None:
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, server, {"revisit": '{"alpha": 1e-3}'}, seed=i) for i in range(4)]
        broken = pool.submit(ask, server, {"revisit": json.dumps({"alpha": BREAKS})})
        with pytest.raises(openai.InternalServerError):
            broken.result()
        for i, other in enumerate(others):
            assert other.result() == expected(server, REFINED, seed=i)
    assert ask(server, {"revisit": '{"alpha": 1e-3}'}) == expected(server, REFINED)


@pytest.mark.skipif(
    os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
    reason="Triton's interpreter cannot run vLLM's kernel for grammars",
)
def test_the_doctor_finds_the_images_and_the_plugin(server: dict[str, Any]) -> None:
    found = {check.name: check for check in engine_doctor.checks(server["url"], "tiny", None, None)}
    assert status([*found.values()]) == 0
    assert found["image"].status == found["image tokens"].status == "PASS"
    assert found["ReVisiT"].value == "the vLLM plug-in is active, and its settings reach the decoding"
