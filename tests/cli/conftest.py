"""Commands as a user types them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_compile.cli.main import main

Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command line below no launcher: it must end with a status, 0 if none is given.

    Returns what it printed, or the error if there is to be one.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def called(line: str, status: int = 0) -> str:
        assert main(line.split()) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return called
