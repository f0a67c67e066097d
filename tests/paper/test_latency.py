"""Timing: profiles with the stated sizes, ratios computed by hand, and a study that resumes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from perf import timing
from perf.random_models import Profile, random_inputs, random_model
from perf.timing import Timing
from revisit import ReVisiT, methods
from revisit.cli.main import app
from revisit.paper import latency
from revisit.step import reference as core


@pytest.mark.parametrize("profile", [Profile(median=20, steps=30), Profile(median=50, spread=0, steps=5)], ids=str)
def test_a_profile_has_the_sets_it_states(profile: Profile) -> None:
    logits = profile.logits(3000)
    made = core.plausible(logits.log_softmax(-1), Profile.ALPHA).sum(-1).tolist()
    assert made == [min(size, 2999) for size in profile.sizes()]
    assert sorted(made)[len(made) // 2] == pytest.approx(profile.median, rel=0.1)
    if profile.spread:
        assert max(made) > 5 * profile.median


def test_ratios_by_hand() -> None:
    base = Timing("greedy", [1.0], [[0.10, 0.12, 0.10, 0.10]], [0.1] * 4, 1, [0.0] * 4, [0.0], [0.0] * 4)
    other = Timing("other", [1.5], [[0.11, 0.13, 0.11, 0.11]], [0.2] * 4, 1, [0.01] * 4, [0.2], [0.02] * 4, peak=2**20)
    row = timing.table([base, other])[1]
    assert row["first_token_ratio"] == pytest.approx(1.5)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["own_ratio"] == pytest.approx(1 + 0.01 / 0.105)  # over the rest of the same steps
    assert row["cpu_ratio"] == pytest.approx(2)
    assert row["own_cpu_ratio"] == pytest.approx(1.2)
    assert row["ms_per_token"] == pytest.approx(115)
    assert row["tokens_per_second"] == pytest.approx(1 / 0.115)
    assert row["extra_memory_mib"] == 1


def test_times_are_medians_and_a_busy_machine_is_reported() -> None:
    calm = Timing("greedy", [1.0], [[0.10], [0.11], [0.10]], [0.1])
    busy = Timing("revisit", [1.0, 9.0, 1.1], [[0.10], [0.30], [0.12]], [0.1])
    rows = latency.table([calm, busy])
    assert [row["ms_per_token"] for row in rows] == pytest.approx([100, 120])
    assert [row["spread"] for row in rows] == pytest.approx([0.1, 1.5])
    assert rows[1]["first_token_ratio"] == pytest.approx(1.1)
    assert "revisit differ by up to 150%" in latency.busy_warning(rows)
    assert latency.busy_warning(rows[:1]) == ""


def test_the_command_reports_every_method() -> None:
    arguments = ["bench", "--max-new-tokens", "5", "--repeats", "1", "--batch-size", "2"]
    arguments += ["--method", "revisit:layers=all", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [row["method"] for row in report["methods"]] == ["greedy", "revisit:layers=all"]
    assert report["methods"][0]["ratio"] == 1
    assert report["methods"][1]["ms_per_token"] > 0


def test_a_script_takes_the_place_of_the_logits() -> None:
    profile = Profile(median=10, spread=0, steps=5)
    model = random_model("qwen2.5-vl-toy")
    plans = {"greedy": (methods.get("greedy"), profile.at), "revisit": (ReVisiT(), profile.at)}
    timings = timing.measure(model, random_inputs(model, 12), plans, new_tokens=5, repeats=1, warmups=0)
    assert timings[1].counters["median_plausible_tokens"] == 10
