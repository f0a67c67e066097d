"""The `revisit` command: one file per subcommand; nothing heavy is imported until a command runs."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import typer

from revisit import settings
from revisit.cli import data
from revisit.cli.ablate import ablate
from revisit.cli.analyze import analyze
from revisit.cli.bench import bench
from revisit.cli.check import check
from revisit.cli.compare import compare
from revisit.cli.demo import demo
from revisit.cli.doctor import doctor
from revisit.cli.eval import evaluate
from revisit.cli.export import export
from revisit.cli.generate import generate
from revisit.cli.lens import lens
from revisit.cli.listing import benchmarks, methods, models
from revisit.cli.report import report
from revisit.cli.reproduce import reproduce
from revisit.cli.score import score
from revisit.cli.serve import serve, ui
from revisit.cli.view import view
from revisit.errors import EXTRAS, RevisitError, missing

app = typer.Typer(
    name="revisit",
    help="Decoding that keeps vision-language models honest about what they see.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_PANELS = {
    "Try": (demo, generate, check, lens, methods, models),
    "Measure": (evaluate, compare, view, report, score, bench, benchmarks),
    "Study": (reproduce, analyze, ablate),
    "Serve": (serve, ui, export),
    "Maintain": (doctor,),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command("eval" if _command is evaluate else None, rich_help_panel=_panel)(_command)
_data = typer.Typer(help="Download the data of a benchmark.", no_args_is_help=True)
_data.command("get")(data.get)
app.add_typer(_data, name="data", rich_help_panel="Maintain")


def _print_version(asked: bool) -> None:
    if asked:
        import revisit

        typer.echo(f"revisit {revisit.__version__}")
        raise typer.Exit


VERSION = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Show the version and exit.")


@app.callback()
def _options(version: bool = VERSION) -> None:
    """Decoding that keeps vision-language models honest about what they see."""


def main(app: typer.Typer = app) -> None:
    """Run the command line; an error that the user can fix is one sentence on stderr and exit status 2."""
    settings.hide_progress_bars(downloads=sys.stderr.isatty())
    _show_log()
    try:
        app()
    except RevisitError as error:
        _end(str(error), error.status)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        _end(str(missing(package)))
    except BrokenPipeError:  # the reader of the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        _end(f"{error.filename}: {error.strerror}; use another path.")


def _show_log() -> None:
    """Send the package's log to stderr: warnings always, the rest on terminals only."""
    log, handler = logging.getLogger("revisit"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("revisit: %(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)


def _end(sentence: str, status: int = 2) -> NoReturn:
    print(f"revisit: {sentence}", file=sys.stderr)
    sys.exit(status)
