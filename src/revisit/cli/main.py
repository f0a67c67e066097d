"""The `revisit` command: one file per subcommand. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import codecs
import errno
import inspect
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from textwrap import dedent
from types import FrameType
from typing import Any, NoReturn

import typer
from pydantic import ValidationError
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from revisit import settings
from revisit.cli import data, options
from revisit.cli.ablate import ablate
from revisit.cli.analyze import analyze
from revisit.cli.bench import bench
from revisit.cli.calibrate import calibrate
from revisit.cli.check import check
from revisit.cli.demo import demo
from revisit.cli.doctor import doctor
from revisit.cli.eval import evaluate
from revisit.cli.generate import generate
from revisit.cli.lens import lens
from revisit.cli.listing import benchmarks, methods, models
from revisit.cli.reproduce import reproduce
from revisit.cli.results import compare, report, view
from revisit.cli.score import score
from revisit.cli.serve import serve, ui
from revisit.decoding.method import METHODS
from revisit.errors import EXTRAS, RevisitError, missing, requirement, short
from revisit.eval.benchmarks.base import BENCHMARKS
from revisit.io.records import Fields

# Exit statuses beside those of errors, which are 1 to 3; see sysexits.h.
CRASHED, NO_OUTPUT = 70, 74


class _PlainHelp:
    """Show flags without a value, and arguments without a Python type."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif isinstance(param, TyperArgument):
                vars(param)["display_type_rich"] = lambda ctx: None
        return params


class Command(_PlainHelp, TyperCommand):
    """A subcommand."""


class Group(_PlainHelp, TyperGroup):
    """A group of subcommands."""


# Typer has a copy of click in newer versions, and depends on click in older ones.
USAGE_ERROR: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
HELP: Fields = {"no_args_is_help": True, "context_settings": {"help_option_names": ["-h", "--help"]}}
COMPLETIONS = {
    **dict.fromkeys(("method", "methods_", "compare_with"), options.completion(METHODS)),
    "benchmark": options.completion(BENCHMARKS),
}
VALUES = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}


def add(group: typer.Typer, command: Callable[..., None], name: str | None = None, panel: str | None = None) -> None:
    """Add a subcommand with completion, plain names of values, and help paragraphs without line breaks."""
    for parameter in inspect.signature(command).parameters.values():
        value = parameter.default
        if isinstance(value, OptionInfo) and value.metavar is None:
            kind = str(parameter.annotation).removeprefix("list[").removesuffix("]")
            value.metavar = VALUES.get(kind)
        if isinstance(value, (OptionInfo, ArgumentInfo)):
            value.autocompletion = COMPLETIONS.get(parameter.name)
    parts = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(dedent(part) if part.startswith(" ") else part.replace("\n", " ") for part in parts)
    group.command(name, cls=Command, help=text, rich_help_panel=panel)(command)


app = typer.Typer(name="revisit", cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich", **HELP)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Try": (demo, generate, check, lens, methods, models),
    "Measure": (evaluate, calibrate, compare, view, report, score, bench, benchmarks),
    "Study": (reproduce, analyze, ablate),
    "Serve": (serve, ui),
    "Maintain": (doctor,),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        add(app, _command, "eval" if _command is evaluate else None, _panel)
_data = typer.Typer(help="Download benchmark data.", cls=Group, **HELP)
add(_data, data.get, "get")
app.add_typer(_data, name="data", rich_help_panel="Maintain")


def _print_version(version: bool) -> None:
    if version:
        import revisit

        typer.echo(f"revisit {revisit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
    ),
) -> None:
    """Decoding methods that reduce object hallucination in vision-language models."""


def main(app: typer.Typer = app) -> None:
    """Run the command line; print errors that the user can fix as one sentence on stderr, with exit status 2."""
    if sys.stdout is None:  # the next file that is opened would get its number, and whatever is printed
        _end("The standard output is closed; redirect it to a file or to /dev/null.", NO_OUTPUT)
    settings.hide_progress_bars(downloads=sys.stderr.isatty())
    codecs.register_error("revisit", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="revisit")
    _show_log()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        try:
            status = app(standalone_mode=False)  # None, or the status of typer.Exit
        finally:
            sys.stdout.flush()
        sys.exit(status)
    except RevisitError as error:
        _end(str(error), error.status)
    except USAGE_ERROR as error:
        if not error.format_message():  # a group without a command has printed its help
            sys.exit(error.exit_code)
        _end(_usage(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        _end(str(missing(package)))
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer ends with 1, which has another meaning
            _end_without_output()
        raise
    except BrokenPipeError:
        _end_without_output()
    except OSError as error:
        if error.filename is not None:
            _end(f"{error.filename}: {error.strerror}; use another path.")
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT):
            _crash()
        _end_without_output(f"The output cannot be written: {error.strerror}.")
    except Exception:
        _crash()


def _usage(error: Any) -> str:
    """Return an error in the arguments of a command as sentences: what is wrong, and where to look."""
    cause, parameter = error.__cause__, getattr(error, "param", None)
    sentence = error.format_message().replace("Value error, ", "").rstrip(".")
    if isinstance(cause, ValidationError) and parameter is not None:
        detail = cause.errors()[0]
        if required := requirement(detail):
            sentence = f"{max(parameter.opts, key=len)} must be {required}, not {short(detail['input'])}"
    return f"{sentence}." + ("" if error.ctx is None else f" See {error.ctx.command_path} --help.")


def _crash() -> NoReturn:
    traceback.print_exc()
    sys.exit(CRASHED)


def _end_without_output(sentence: str = "") -> NoReturn:
    """End with an exit status of its own; a reader that went away, such as `head`, needs no sentence."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
    if sentence:
        _end(sentence, NO_OUTPUT)
    sys.exit(NO_OUTPUT)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop a command in order at the first Ctrl-C; the second one ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace characters outside the terminal's encoding, and never lose the sign of a number."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return text.translate({ord("−"): "-", ord("±"): "+/-"}).encode("ascii", "replace").decode(), error.end


def _show_log() -> None:
    """Send the package's log to stderr: warnings always, the rest on terminals only."""
    log = logging.getLogger("revisit")
    log.handlers = [_Log()]
    log.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)


class _Log(logging.Handler):
    """Print records on stderr; warnings and errors begin with a word in color."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        color = {logging.WARNING: typer.colors.YELLOW, logging.ERROR: typer.colors.RED}.get(record.levelno)
        _say(self.format(record), "" if color is None else record.levelname.lower(), color)


def _say(text: str, kind: str, color: str | None) -> None:
    start = typer.style(f"{kind}: ", fg=color, bold=True) if kind else ""
    typer.echo(start + text, err=True)


def _end(sentence: str, status: int = 2) -> NoReturn:
    _say(sentence, "error", typer.colors.RED)
    sys.exit(status)
