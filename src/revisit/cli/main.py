"""The `revisit` command: one file per subcommand, listed here; nothing heavy is imported until a command runs."""

from __future__ import annotations

import importlib
import sys

import typer

from revisit.errors import RevisitError

app = typer.Typer(
    name="revisit",
    help="Decoding that keeps vision-language models honest about what they see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# Each module has `register(app)`, which adds its command(s).
COMMANDS = (
    "generate",
    "bench",
    "listing",
    "demo",
    "score",
    "scenes",
    "data",
    "tiny",
    "eval",
    "compare",
    "explain",
    "lens",
    "ui",
    "serve",
    "analyze",
    "ablate",
    "report",
    "export",
)

for _name in COMMANDS:
    importlib.import_module(f"revisit.cli.{_name}").register(app)


def main() -> None:
    """Run the command line; anything the user can put right is one sentence on stderr and exit status 2."""
    try:
        app()
    except RevisitError as error:
        print(f"revisit: {error}", file=sys.stderr)
        sys.exit(2)
