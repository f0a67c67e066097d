"""Evaluation on a two-node Ray cluster of this machine, one node of which is killed. Run by `make test-ray`."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not in this environment: run `make test-ray`", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import ray
from fake_grid import Letters, answers_of, check_equal, write_items
from ray.cluster_utils import Cluster

import families
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.config import EvalConfig
from revisit.eval.engines.ray import RayEngine
from revisit.eval.run import run
from revisit.io.files import read_lines
from revisit.methods.revisit import ReVisiT

pytestmark = pytest.mark.timeout(3000)
ITEMS = 500


class Lengths(Letters):
    """Scores the length of answers: those of a random model may be empty."""

    name = "lengths"
    max_new_tokens = 4

    def score(self, items: list[Item], answers: Any) -> Scores:
        terms = {item.id: (float(len(answers[item.id])), 1.0) for item in items}
        return Scores.of({"vowels": terms, "yes": terms}, {"items": len(items)})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> EvalConfig:
    """A local evaluation of a tiny model on 500 questions about 20 images."""
    data = write_items(tmp_path_factory.mktemp("data"), ITEMS)
    (data / "images").mkdir()
    for i in range(ITEMS):
        families.image(i % 20).save(data / "images" / f"{i}.png")
    return EvalConfig(
        model=str(model_folder), method=ReVisiT(alpha=0.01), benchmark=Lengths(), data=str(data), batch_size=5
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with one CPU each."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_a_killed_node_loses_nothing_and_repeats_nothing(local: EvalConfig, cluster: Cluster, tmp_path: Path) -> None:
    run(local.replace(out=tmp_path / "alone"))
    victim = next(iter(cluster.worker_nodes))
    killed: list[int] = []

    def kill_when_under_way() -> None:
        while (done := stored(tmp_path / "cluster")) < ITEMS // 5:
            time.sleep(0.05)
        cluster.remove_node(victim, allow_graceful=False)
        killed.append(done)

    killer = threading.Thread(target=kill_when_under_way, daemon=True)
    killer.start()
    run(local.replace(out=tmp_path / "cluster", engine="ray", workers=2, address=cluster.address))
    killer.join(60)
    assert killed, "the run was over before a node could be killed"
    assert ITEMS // 5 <= killed[0] < ITEMS
    check_equal(tmp_path / "cluster", tmp_path / "alone")


def stored(output: Path) -> int:
    return sum(len(read_lines(path)[0]) - 1 for path in output.glob("logs/*.jsonl"))


def test_a_local_run_continues_in_the_cluster(local: EvalConfig, cluster: Cluster, tmp_path: Path) -> None:
    run(local.replace(out=tmp_path, limit=10))
    ((log, before),) = answers_of(tmp_path).items()
    run(local.replace(out=tmp_path, limit=20, engine="ray", workers=1, address=cluster.address))
    after = answers_of(tmp_path)[log]
    assert (after[:10], len(after)) == (before, 20)


def test_a_cluster_that_is_not_there_raises() -> None:
    ray.shutdown()
    with pytest.raises(RevisitError, match="no Ray cluster"):
        RayEngine("tiny", address="127.0.0.1:1").ray  # noqa: B018
