"""Help, completion, missing packages, busy ports and interruptions."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command_line import Run
from typer.testing import CliRunner

from revisit import RevisitError
from revisit.cli import options
from revisit.cli.listing import describe
from revisit.cli.main import app
from revisit.cli.options import chosen_method
from revisit.decoding.method import METHODS
from revisit.eval.benchmarks.base import BENCHMARKS
from revisit.registry import Registry
from servers import heed_signals


def test_the_methods_of_a_command_line() -> None:
    assert chosen_method("vcd", []) == ("vcd", {})
    assert chosen_method("revisit:layers=all", ["alpha=0.1"]) == ("revisit", {"alpha": "0.1", "layers": "all"})
    with pytest.raises(RevisitError, match="--method and --set give alpha different values"):
        chosen_method("revisit:alpha=1e-3", ["alpha=0.1"])
    assert chosen_method("revisit:layers=2,4,alpha=1e-3", []) == ("revisit", {"layers": "2,4", "alpha": "1e-3"})
    assert chosen_method("chain:methods=vcd,revisit", []) == ("chain", {"methods": "vcd,revisit"})
    with pytest.raises(RevisitError, match="key=value"):
        chosen_method("revisit:all", [])


def test_the_log_is_on_stderr_with_the_traceback_of_internal_errors(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """`revisit serve` logs failed batches; the cause must be in its log."""
    assert run("--version").status == 0
    try:
        raise KeyError("cause")
    except KeyError as error:
        logging.getLogger("revisit.serve.batcher").error("A batch failed", exc_info=error)
    err = capsys.readouterr().err
    assert err.startswith("error: A batch failed\nTraceback")
    assert "KeyError: 'cause'" in err


def test_a_busy_port(run: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for command in ("serve", "ui"):
            done = run(command, "--port", port)
            assert done.status == 2
            assert f"Cannot listen on 127.0.0.1:{port}" in done.sentence


def test_interrupted_scenes_leave_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from revisit.eval.benchmarks.io.places import scene_folder; scene_folder('scenes:usual:5000:0')",
        ],
        env={**os.environ, "REVISIT_CACHE": str(tmp_path)},
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    ) as process:
        drawn = tmp_path / ".scenes-usual-5000-0-v1.draft/val2014"
        while process.poll() is None and not (drawn.is_dir() and len(os.listdir(drawn)) > 3):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shell", "status", "sentence"),
    [
        ("{} methods > /dev/full", 74, "The output cannot be written: No space left on device."),
        ("{} methods >&-", 74, "The standard output is closed; redirect it to a file or to /dev/null."),
        ("{} methods | true; exit ${{PIPESTATUS[0]}}", 74, ""),
        ("{} crash", 70, "ZeroDivisionError"),
        ("{} doubts", 0, ""),
    ],
)
def test_output_that_cannot_be_written_and_crashes_have_statuses_of_their_own(
    shell: str, status: int, sentence: str
) -> None:
    code = """from revisit.cli.main import app, main
app.command('crash')(lambda: 1 / 0)
app.command('doubts')(lambda: print('\u221216.7 \u00b1 1 \u72ac'))
main()"""
    command = shell.format(f"{sys.executable} -c {shlex.quote(code)}")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (status, "-16.7 +/- 1 ?\n" if "doubts" in shell else "")
    assert done.stderr.removeprefix("error: ").strip().endswith(sentence) if status == 74 else sentence in done.stderr
    assert ("Traceback" in done.stderr) == (status == 70)


@pytest.mark.parametrize("again", [False, True])
def test_a_second_interrupt_ends_at_once_without_a_traceback(again: bool) -> None:
    code = """import time
from revisit.cli.main import app, main
@app.command()
def wait():
    try:
        print('ready', flush=True)
        time.sleep(60)
    finally:
        print('cleaning', flush=True)
        time.sleep(5 if again else 0)
main()""".replace("again", str(again))
    command = [sys.executable, "-c", code, "wait"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, preexec_fn=heed_signals) as waiting:
        assert waiting.stdout is not None
        assert waiting.stderr is not None
        for line in ("ready", "cleaning")[: 1 + again]:
            assert waiting.stdout.readline() == f"{line}\n"
            waiting.send_signal(signal.SIGINT)
        assert waiting.wait(4) == (-signal.SIGINT if again else 130)
        assert waiting.stderr.read() == ""


def test_serve_uses_recommended_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recommendations fill in the settings that the command line leaves out."""
    from revisit.serve import server
    from revisit.serve.app import Service
    from revisit.serve.limits import Limits

    services: list[Service] = []

    def build(service: Service) -> None:
        services.append(service)
        raise KeyboardInterrupt

    monkeypatch.setattr("revisit.serve.app.build", build)
    for settings, neighbors in (({}, 8), ({"neighbors": "2"}, 2)):
        with pytest.raises(KeyboardInterrupt):
            server.serve("tiny", host="127.0.0.1", port=0, limits=Limits(), settings=settings)
        assert services[-1].method.settings()["neighbors"] == neighbors


def test_the_same_option_has_the_same_name_everywhere() -> None:
    """Every command uses --out, --limit and --batch-size, and no short option has two meanings."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = [[name for name in parameter.opts if name[0] == "-"] for c in commands.values() for parameter in c.params]
    assert {"--output", "--n", "--batch", "--new-tokens"}.isdisjoint(name for option in names for name in option)
    short: dict[str, set[str]] = {}
    for long, *others in (sorted(option, key=len, reverse=True) for option in names if option):
        for other in others:
            short.setdefault(other, set()).add(long)
    assert short["-o"] == {"--out"}
    assert [option for option, meanings in short.items() if len(meanings) > 1] == []


def test_completion_offers_the_last_of_several_names() -> None:
    assert "revisit,vcd" in options.completion(METHODS)("revisit,vc")
    found = CliRunner().invoke(
        app, env={"_REVISIT_COMPLETE": "complete_bash", "COMP_WORDS": "revisit eval --benchmark pop", "COMP_CWORD": "3"}
    )
    assert found.stdout.split() == ["pope"]


def test_methods_shows_the_prompts_that_are_sent(run: Run) -> None:
    own, disturbed = json.loads(run("methods", "icd", "--prompt", "tiny", "--json").out)
    assert (own["kind"], own["runs"]) == ("the prompt", 1)
    assert "[64 vision tokens]" in own["text"]
    assert "[64 vision tokens]" in disturbed["text"]
    assert "confused objects detector" in disturbed["text"]
    assert len(disturbed["tokens"]) > len(own["tokens"])
    shown = run("methods", "code:description_tokens=3", "--prompt", "tiny").out
    assert shown.count("written by the method") == 2
    assert "run 2 times, 75 tokens" in run("methods", "vcd", "--prompt", "tiny").out  # with another image
    assert "needs the name of a method" in run("methods", "--prompt", "tiny").sentence


@pytest.mark.parametrize(("command", "registry"), [("methods", METHODS), ("benchmarks", BENCHMARKS)])
def test_every_setting_is_shown_with_its_default_and_its_meaning(
    run: Run, command: str, registry: Registry[Any]
) -> None:
    for name in registry.names():
        assert [entry["name"] for entry in describe(registry.find(name)) if not entry["about"]] == [], name
    shown = run(command, {"methods": "vcd", "benchmarks": "pope"}[command]).out
    wanted = {
        "methods": ("| noise_step | 500 | integer >= 0, <= 999 | How far", "--method vcd:alpha=1.0", "2311.16922"),
        "benchmarks": ("| suffix | none | 'none' or 'one-word' |", "--benchmark pope", "--data download", "license  "),
    }
    assert [text for text in wanted[command] if text not in shown] == []
