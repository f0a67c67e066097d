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
from fake_grid import Letters, numbers_of, rows_of, write_items
from ray.cluster_utils import Cluster

import families
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Scores, ratio
from revisit.eval.config import EvalConfig
from revisit.eval.engines.ray import RayEngine
from revisit.eval.run import run
from revisit.explain.files import read_lines
from revisit.methods.revisit import ReVisiT

pytestmark = pytest.mark.timeout(3000)
ITEMS = 500


class Lengths(Letters):
    """Scores the length of answers: those of a random model may be empty."""

    name = "lengths"
    max_new_tokens = 4

    def score(self, items: list[Item], answers: Any) -> Scores:
        terms = {item.id: (float(len(answers[item.id])), 1.0) for item in items}
        per_item = {"vowels": terms, "yes": terms}
        return Scores({key: ratio(value.values()) for key, value in per_item.items()}, per_item, {"items": len(items)})


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model on disk and 500 questions about 20 images."""
    folder = tmp_path_factory.mktemp("material")
    model, processor = families.build("llava")
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    data = write_items(folder / "data", ITEMS)
    (data / "images").mkdir()
    for i in range(ITEMS):
        families.image(i % 20).save(data / "images" / f"{i}.png")
    return {"model": folder / "model", "data": data}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with one CPU each."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def config(material: dict[str, Path], out: Path, engine: str, **options: Any) -> EvalConfig:
    return EvalConfig(
        model=str(material["model"]),
        method=ReVisiT(alpha=0.01),
        benchmark=Lengths(),
        data=str(material["data"]),
        out=str(out),
        batch_size=5,
        engine=engine,
        **options,
    )


def test_a_node_killed_in_the_middle_loses_nothing_and_repeats_nothing(
    material: dict[str, Path], cluster: Cluster, tmp_path: Path
) -> None:
    alone = run(config(material, tmp_path / "alone", "local"))
    victim = next(iter(cluster.worker_nodes))
    killed: list[int] = []

    def kill_when_under_way() -> None:
        while (done := stored(tmp_path / "cluster")) < ITEMS // 5:
            time.sleep(0.05)
        cluster.remove_node(victim, allow_graceful=False)
        killed.append(done)

    killer = threading.Thread(target=kill_when_under_way, daemon=True)
    killer.start()
    spread_out = run(config(material, tmp_path / "cluster", "ray", workers=2, address=cluster.address))
    killer.join(60)
    assert killed, "the run was over before a node could be killed"
    assert ITEMS // 5 <= killed[0] < ITEMS
    ours, theirs = rows_of(tmp_path / "cluster"), rows_of(tmp_path / "alone")
    assert list(ours) == list(theirs)  # the same spec
    (log,) = ours
    assert len(ours[log]) == ITEMS  # nothing lost, nothing twice
    assert sorted(ours[log], key=lambda row: row["id"]) == sorted(theirs[log], key=lambda row: row["id"])
    assert numbers_of(spread_out) == numbers_of(alone)


def stored(output: Path) -> int:
    return sum(len(read_lines(path)[0]) - 1 for path in output.glob("logs/*.jsonl"))


def test_a_run_begun_alone_goes_on_in_the_cluster(material: dict[str, Path], cluster: Cluster, tmp_path: Path) -> None:
    local = config(material, tmp_path, "local", limit=10)
    run(local)
    ((log, before),) = rows_of(tmp_path).items()
    run(local.replace(limit=20, engine="ray", workers=1, address=cluster.address))
    assert rows_of(tmp_path)[log][:10] == before
    assert len(rows_of(tmp_path)[log]) == 20


def test_a_cluster_that_is_not_there_raises() -> None:
    ray.shutdown()
    with pytest.raises(RevisitError, match="no Ray cluster"):
        RayEngine("tiny", address="127.0.0.1:1").ray  # noqa: B018
