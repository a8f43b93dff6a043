# SPDX-License-Identifier: Apache-2.0
"""The command line as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from cupyinfer.cli import main


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """Standard output as JSON."""
        return dict(json.loads(self.out))


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call it with arguments; numbers and paths may come as they are."""

    def call(*argv: object) -> Outcome:
        capsys.readouterr()
        code = main([str(arg) for arg in argv])
        return Outcome(code, *capsys.readouterr())

    return call
