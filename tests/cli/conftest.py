"""Run commands as a user types them."""

from __future__ import annotations

import sys

import pytest
from command_line import Done, Run

from revisit.cli.main import main


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process, because importing torch again takes seconds."""

    def command(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["revisit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return command
