"""The real slow network says what it lacks, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from benchmarks.network import namespaces


def _cannot() -> str:
    try:
        with namespaces.slow_network(1.0):
            return ""
    except namespaces.UnavailableError as error:
        return str(error)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(namespaces.UnavailableError, match="tc not found: install iproute2"):
        namespaces.check_available()


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(namespaces.UnavailableError, match="need root"):
        namespaces.check_available()


@pytest.mark.optional
def test_the_link_has_its_rate_and_goes_away() -> None:
    reason = _cannot()
    if reason:
        pytest.skip(reason)
    with namespaces.slow_network(1.0) as hosts:
        shown = _output("ip", "netns", "exec", hosts[0].namespace, "tc", "qdisc", "show", "dev", hosts[0].interface)
        assert "rate 1Gbit" in shown
        assert hosts[0].namespace in _output("ip", "netns", "list")
    assert hosts[0].namespace not in _output("ip", "netns", "list")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
