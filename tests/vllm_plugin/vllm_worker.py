"""Run lists of requests through vLLM engines, one after another, and record the results.

    python vllm_worker.py JOB.json RESULT.json

Runs in the environment that has vLLM, on the runner that VLLM_USE_V2_MODEL_RUNNER names. A job holds engines, each with its
model folder and requests; with "plugged": false nothing of ours is switched on, which is the vanilla run that others are
compared with.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def parameters(request: dict[str, Any], plugged: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    extra = {"revisit": request["revisit"]} if plugged and request.get("revisit") is not None else None
    more = dict(request.get("options", {}))
    if "logit_bias" in more:
        more["logit_bias"] = {int(token): value for token, value in more["logit_bias"].items()}
    if "structured_outputs" in more:
        more["structured_outputs"] = StructuredOutputsParams(**more["structured_outputs"])
    return SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        ignore_eos=not request.get("eos", False),
        logprobs=1,
        extra_args=extra,
        detokenize=False,
        **more,
    )


def prompt(request: dict[str, Any], place: str) -> Any:
    from families import image
    from revisit.embedded.samples import SAMPLES

    images = [image(seed) for seed in request["images"]]
    images += [list(SAMPLES.values())[number].image() for number in request.get("scenes", ())]
    text = place * len(images) + request["text"]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def noted_calls(owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Record the positional arguments of every call of a method."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append((*args, *kwargs.values()))
        return original(*args, **kwargs)

    setattr(owner, name, called)
    return calls


@contextmanager
def watched_steps(states: bool) -> Iterator[dict[str, Any]]:
    """Count the refined rows; record the vision states of every request at its first step too, by the request's number."""
    from revisit.vllm.worker import Worker

    watched: dict[str, Any] = {"rows": 0, "states": {}}
    take_step = Worker._take_step

    def take(self: Any, logits: Any, group: Any) -> None:
        take_step(self, logits, group)
        watched["rows"] += len(group)
        for row in group if states else ():
            kept = self.pool.rows([row.request.blocks], [row.request.states]).row(0)
            watched["states"].setdefault(row.request.name.split("-")[0], kept.float().tolist())

    with patch.object(Worker, "_take_step", take):
        yield watched


def allow_any_mask() -> None:
    """Let Triton's interpreter load and store with masks of whole numbers, as vLLM's kernels do and the compiler allows."""
    from triton.runtime.interpreter import InterpreterBuilder

    def with_any_mask(original: Any) -> Any:
        def called(self: Any, *args: Any) -> Any:
            mask = args[1 if original.__name__ == "create_masked_load" else 2]
            mask.data = mask.data.astype(bool)
            return original(self, *args)

        return called

    for name in ("create_masked_load", "create_masked_store"):
        setattr(InterpreterBuilder, name, with_any_mask(getattr(InterpreterBuilder, name)))


def compile_models() -> None:
    """Let vLLM's CPU build compile models as its GPU builds do, without the passes that need operators of a GPU."""
    import torch.utils._triton
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config.compilation import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        check(config)
        compilation = config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        compilation.compile_sizes = []
        for name, value in vars(compilation.pass_config).items():
            if value is True:
                setattr(compilation.pass_config, name, False)

    CpuPlatform.check_and_update_config = staticmethod(checked)
    FixFunctionalizationPass.__call__ = lambda *_: None
    torch.utils._triton.triton_hash_with_backend = lambda: "interpreted"  # the V2 runner's kernels are not compiled


def run_engine(engine: dict[str, Any], plugged: bool) -> dict[str, Any]:
    """Run all requests of one engine, and record the plug-in's state and counters afterwards."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import qwen3_vl

    if qwen3_vl.HAS_TRITON:  # whose interpreter multiplies the bits of bfloat16 as integers
        qwen3_vl.triton_pos_embed_interpolate = qwen3_vl.pos_embed_interpolate_native
    os.environ["REVISIT_VLLM_LAYERS"] = engine.get("layers", "")  # what the model recommends
    os.environ["REVISIT_VLLM_POOL_MB"] = str(engine.get("pool_mb", ""))
    llm = LLM(
        engine["model"],
        dtype=engine.get("dtype", "float32"),
        enforce_eager=not engine.get("compiled"),
        seed=0,
        limit_mm_per_prompt={"image": 2, "video": 0},
        **{"max_model_len": 512, **engine["options"]},
    )
    core = llm.llm_engine.engine_core.engine_core
    preempted = noted_calls(core.scheduler, "_preempt_request")
    verified = noted_calls(core.scheduler, "make_spec_decoding_stats")
    requests = engine["requests"]
    outputs, memory = [], []
    size = -(-len(requests) // engine.get("rounds", 1))
    with watched_steps("states" in engine) if plugged else nullcontext({"states": {}}) as watched:
        for part in (requests[i : i + size] for i in range(0, len(requests), size)):
            outputs += llm.generate(
                [prompt(r, engine["place"]) for r in part], [parameters(r, plugged) for r in part], use_tqdm=False
            )
            gc.collect()
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    rows = [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True)],
            "prompt": len(output.prompt_token_ids),
            "cached": output.num_cached_tokens,
            "finished": answer.finish_reason,
            "states": watched["states"].get(output.request_id),
        }
        for output in outputs
        for answer in output.outputs
    ]
    while core.scheduler.has_requests():  # what a server's loop does when requests have ended: tell the workers
        core.step()
    result = {
        "name": engine["name"],
        "v2": llm.llm_engine.vllm_config.use_v2_model_runner,
        "rows": rows,
        "preemptions": len(preempted),
        "memory": memory,
        "accepted": sum(accepted for _, _, accepted, *_ in verified),
    }
    if plugged:
        from revisit.vllm.worker import OVERRULED

        worker = core.model_executor.driver_worker.worker.model_runner.get_model().revisit
        result |= {"requests": len(worker.requests), "blocks": worker.plan.blocks, "refined": watched["rows"]}
        result["overruled"] = worker.counts[OVERRULED]
        del worker
    del llm, core
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


def run(folder: Path, name: str, engines: list[dict[str, Any]], plugged: bool = True) -> list[dict[str, Any]]:
    """Run these engines in their own process, which writes files of that name into the folder."""
    job, result = folder / f"{name}.json", folder / f"{name}-result.json"
    job.write_text(json.dumps({"plugged": plugged, "engines": engines}))
    done = subprocess.run([sys.executable, __file__, str(job), str(result)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    results: list[dict[str, Any]] = json.loads(result.read_text())
    return results


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    os.environ.update(SETTINGS)
    os.environ.pop("REVISIT_VLLM", None)
    if job["plugged"]:
        os.environ["REVISIT_VLLM"] = "1"
    sys.path.insert(0, str(Path(__file__).parent.parent))
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        allow_any_mask()
    if any(engine.get("compiled") for engine in job["engines"]):
        compile_models()
    results = []
    for engine in job["engines"]:
        results.append(run_engine(engine, job["plugged"]))
        Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
