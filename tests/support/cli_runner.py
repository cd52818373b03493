"""Runs the command inside the test's process, in a directory of its own."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one message of a failed command, without ``error: ``."""
        assert "Traceback" not in self.err
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("error: ")

    @property
    def mistake(self) -> str:
        """The one message of a command that was used wrongly."""
        assert self.code == 2, self.err
        return self.error

    @property
    def text(self) -> str:
        """What a command printed that ended well."""
        assert self.code == 0, self.err
        return self.out

    @property
    def json(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.text)


Run = Callable[..., Done]


@pytest.fixture(name="run")
def run_fixture(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.fspath(tmp_path))])

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Done(code=int(stopped.value.code or 0), out=out, err=err)

    return call
