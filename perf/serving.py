"""Measure serving: `load` stresses a running `revisit serve`, `throughput` compares engines on one model in one run.

    python perf/serving.py load --clients 200 --seconds 60         starts a server of its own and ends it by SIGTERM
    .venv-vllm/bin/python perf/serving.py throughput               vLLM with and without ReVisiT, transformers, serve

Both are bounded in count and time and print one JSON object, with ratios where two things can be measured in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "vllm_plugin")]


def data_uri(seed: int) -> str:
    from families import image

    buffer = io.BytesIO()
    image(seed).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def question(model: str, image: str, tokens: int, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is in the picture?"}]
    return {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": tokens, **more}


def bomb() -> str:
    """Return a PNG of a few hundred bytes that declares 100,000 × 100,000 pixels."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = piece(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + header + piece(b"IDAT", zlib.compress(bytes(1000))) + piece(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


# -- load ---------------------------------------------------------------------------------------------------------


def malformed(dice: random.Random, image: str) -> tuple[bytes, dict[str, str]]:
    """Return a request that the server must reject."""
    good = question("tiny", image, 4)
    headers = {"content-type": "application/json"}
    kind = dice.randrange(6)
    if kind == 0:
        return b"{" * 50, headers
    if kind == 1:
        return json.dumps({**good, "max_tokens": -1}).encode(), headers
    if kind == 2:
        return json.dumps(question("tiny", "data:image/png;base64,AAAA", 4)).encode(), headers
    if kind == 3:
        return json.dumps({**good, "decoding": {"method": "none"}}).encode(), headers
    if kind == 4:
        return json.dumps({**good, "messages": []}).encode(), headers
    return json.dumps(good).encode(), {"content-type": "text/plain"}


class Server:
    """Run `revisit serve` in a process of its own."""

    def __init__(self, model: str, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "revisit", "serve", "-m", model, "--name", "tiny", "--port", str(port)]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)})

    def wait(self, seconds: float = 300) -> None:
        import httpx

        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            try:
                httpx.get(self.url + "/health")
                return
            except httpx.TransportError:
                time.sleep(0.5)
        raise SystemExit("the server did not start")

    def memory(self) -> float:
        """Return the resident megabytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def client(url: str, number: int, until: float, tokens: int, images: list[str], found: dict[str, Any]) -> None:
    """Run one client that sends its next request as soon as it has an answer; one in twenty is malformed."""
    import httpx

    dice = random.Random(number)
    async with httpx.AsyncClient(timeout=300) as http:
        while time.monotonic() < until:
            bad = dice.random() < 0.05
            image = dice.choice(images)
            body, headers = (
                malformed(dice, image)
                if bad
                else (json.dumps(question("tiny", image, tokens)).encode(), {"content-type": "application/json"})
            )
            began = time.monotonic()
            try:
                reply = await http.post(url + "/v1/chat/completions", content=body, headers=headers)
                status: Any = reply.status_code
            except httpx.TransportError as error:
                status = type(error).__name__
            found.setdefault("malformed" if bad else "well-formed", []).append((status, time.monotonic() - began))


async def stress(server: Server, clients: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Run all clients at once; return counts, times and the server's memory."""
    images = [data_uri(seed) for seed in range(8)]
    found: dict[str, Any] = {}
    memory: list[float] = []
    until = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append(server.memory())
            await asyncio.sleep(max(1.0, seconds / 30))

    await asyncio.gather(watch(), *(client(server.url, n, until, tokens, images, found) for n in range(clients)))
    good, bad = found.get("well-formed", []), found.get("malformed", [])
    times = sorted(t for _, t in good)
    half = memory[len(memory) // 2 :]
    return {
        "well_formed": len(good),
        "answered": sum(status == 200 for status, _ in good),
        "not_answered": sorted({str(status) for status, _ in good if status != 200}),
        "malformed": len(bad),
        "malformed_statuses": sorted({str(status) for status, _ in bad}),
        "requests_per_second": round(len(good) / seconds, 2),
        "median_seconds": round(statistics.median(times), 3) if times else None,
        "p99_seconds": round(times[int(0.99 * (len(times) - 1))], 3) if times else None,
        "memory_mb": {
            "start": round(memory[0]),
            "middle": round(half[0]),
            "end": round(half[-1]),
            "largest": round(max(memory)),
        },
    }


def hostile(url: str) -> dict[str, int]:
    """Return the statuses of requests that a server must reject."""
    import httpx

    def post(**body: Any) -> int:
        return httpx.post(url + "/v1/chat/completions", json=body, timeout=60).status_code

    large = b'{"x": "' + b"a" * 50_000_000 + b'"}'
    try:
        big = httpx.post(
            url + "/v1/chat/completions", content=large, headers={"content-type": "application/json"}, timeout=60
        ).status_code
    except httpx.WriteError:  # the connection was closed while we were still sending
        big = 413
    return {
        "decompression bomb": post(**question("tiny", bomb(), 2)),
        "50 MB body": big,
        "URL to loopback": post(**question("tiny", "http://127.0.0.1:1/x.png", 2)),
        "path as image": post(**question("tiny", "/etc/passwd", 2)),
        "file URL": post(**question("tiny", "file:///etc/passwd", 2)),
    }


def load(options: argparse.Namespace) -> dict[str, Any]:
    import httpx

    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            from families import build

            built, processor = build("llava")
            built.save_pretrained(folder)
            processor.save_pretrained(folder)
            model = folder
        server = Server(model, options.threads)
        try:
            server.wait()
            httpx.post(server.url + "/v1/chat/completions", json=question("tiny", data_uri(0), 4), timeout=300)
            result = asyncio.run(stress(server, options.clients, options.seconds, options.tokens))
            result["rejected"] = hostile(server.url)
            last: list[str] = []
            body, http = question("tiny", data_uri(1), 256), httpx.Client(timeout=300)

            def final() -> None:
                try:
                    last.append(str(http.post(server.url + "/v1/chat/completions", json=body).status_code))
                except httpx.TransportError as error:
                    last.append(type(error).__name__)

            begun = [threading.Thread(target=final) for _ in range(20)]
            for thread in begun:
                thread.start()
            time.sleep(1)  # enough for all requests to arrive, not for their answers
            server.process.send_signal(signal.SIGTERM)
            for thread in begun:
                thread.join(300)
            server.process.wait(120)
            result["sigterm"] = {
                "begun": 20,
                "answered": last.count("200"),
                "statuses": sorted(set(last)),
            }
            return result
        finally:
            server.process.kill()


# -- throughput ---------------------------------------------------------------------------------------------------

MEDIUM = {  # 0.27 B parameters in the text model
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 32000,
}


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of vLLM, transformers and `revisit serve` for the same requests and mid-size random model."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        REVISIT_VLLM="1",
    )
    import torch
    import vllm_models
    from vllm import LLM, SamplingParams

    from families import image
    from revisit import ReVisiT, generate
    from revisit.models.prompts import encode

    count, tokens = options.requests, options.tokens
    with tempfile.TemporaryDirectory() as folder:
        model, processor = vllm_models.build("llava", **MEDIUM)
        with torch.no_grad():  # a few dozen plausible tokens, as real models have
            model.get_output_embeddings().weight.normal_(0, 8 / MEDIUM["hidden_size"] ** 0.5)
        vllm_models.save(model, processor, Path(folder))
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            enable_prefix_caching=False,  # every round sends the same prompts
        )
        images = [image(i) for i in range(count)]
        texts = [f"<image>\n{i} What is in the picture?" for i in range(count)]
        prompts = [{"prompt": t, "multi_modal_data": {"image": i}} for t, i in zip(texts, images, strict=True)]

        def vllm(extra: Any) -> float:
            parameters = SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra, detokenize=False
            )
            began = time.perf_counter()
            llm.generate(prompts, parameters, use_tqdm=False)
            return count * tokens / (time.perf_counter() - began)

        def transformers(method: Any) -> float:
            began = time.perf_counter()
            for start in range(0, count, 16):
                part = slice(start, start + 16)
                inputs = encode(processor, texts[part], [[i] for i in images[part]])
                generate(model, **inputs, method=method, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
            return count * tokens / (time.perf_counter() - began)

        ways = {
            "vllm": lambda: vllm(None),
            "vllm revisit": lambda: vllm({"revisit": {"alpha": options.alpha}}),
            "transformers": lambda: transformers(None),
            "transformers revisit": lambda: transformers(ReVisiT(alpha=options.alpha)),
            "serve revisit": lambda: served(model, processor, options.alpha, count, tokens),
        }
        ways = dict(list(ways.items())[:2]) if options.vllm_only else ways
        for warm in ("vllm", "vllm revisit"):
            ways[warm]()
        wall: dict[str, list[float]] = {name: [] for name in ways}
        busy: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):  # interleaved, so that other processes affect all engines alike
            for name, way in ways.items():
                began = time.process_time()
                wall[name].append(way())
                busy[name].append((time.process_time() - began) / (count * tokens))
        cost = {name: statistics.median(values) for name, values in busy.items()}
        return {
            "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in wall.items()},
            "processor_ms_per_token": {name: round(1000 * value, 2) for name, value in cost.items()},
            # Everything runs in this process, and other processes affect its processor time less than wall-clock time.
            "plain_over_revisit": {
                name: round(cost[name] / cost[f"{name} revisit"], 3)
                for name in ("vllm", "transformers")
                if name in cost
            },
            "of_each_round_in_vllm": [round(a / b, 3) for a, b in zip(busy["vllm"], busy["vllm revisit"], strict=True)],
            "v2_runner": llm.llm_engine.vllm_config.use_v2_model_runner,
            "requests": count,
            "tokens_each": tokens,
            "model": MEDIUM,
        }


def served(model: Any, processor: Any, alpha: float, count: int, tokens: int) -> float:
    """Return the tokens per second of `revisit serve` at 16 concurrent requests, in this process."""
    import httpx
    import uvicorn

    from revisit import ReVisiT
    from revisit.serve.app import Service, build
    from revisit.serve.connection import configure
    from revisit.serve.decoder import Decoder
    from revisit.serve.limits import Limits

    decoder = Decoder(model, processor)
    decoder.end = set()  # answers of full length, as for the others
    model.generation_config.eos_token_id = None
    service = Service(decoder, "tiny", ReVisiT(alpha=alpha), Limits(batch=16))
    server = uvicorn.Server(configure(build(service), service.limits, host="127.0.0.1", port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/chat/completions"
    bodies = [question("tiny", data_uri(i), tokens) for i in range(count)]

    async def ask_all() -> None:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(timeout=600) as http:

            async def one(body: dict[str, Any]) -> None:
                async with gate:
                    (await http.post(url, json=body)).raise_for_status()

            await asyncio.gather(*(one(body) for body in bodies))

    began = time.perf_counter()
    asyncio.run(ask_all())
    seconds = time.perf_counter() - began
    server.should_exit = True
    thread.join()
    return count * tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("load")
    one.add_argument("--model", default=None, help="a model folder; by default a tiny random LLaVA")
    one.add_argument("--clients", type=int, default=200)
    one.add_argument("--seconds", type=float, default=60)
    one.add_argument("--tokens", type=int, default=8)
    one.add_argument("--threads", type=int, default=1)
    one.set_defaults(run=load)
    two = commands.add_parser("throughput")
    two.add_argument("--requests", type=int, default=32)
    two.add_argument("--tokens", type=int, default=32)
    two.add_argument("--rounds", type=int, default=3)
    two.add_argument("--alpha", type=float, default=1e-5)
    two.add_argument("--vllm-only", action="store_true", help="only vLLM with and without ReVisiT")
    two.set_defaults(run=throughput)
    options = parser.parse_args()
    print(json.dumps(options.run(options), indent=2))


if __name__ == "__main__":
    main()
