"""The package's description has no link that a package index cannot follow."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
INTERFACE = "hatchling.metadata.plugin.interface"


def test_the_description_has_no_link_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["readme"]
    interface = ModuleType(INTERFACE)  # hatchling is there only while the package is built
    interface.__dict__["MetadataHookInterface"] = object
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    hook = runpy.run_path(str(ROOT / project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]))["Readme"]
    metadata: dict[str, dict[str, str]] = {}
    hook.update(SimpleNamespace(root=ROOT), metadata)
    text = metadata["readme"]["text"]
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https:")] == []
    assert "![" not in text
    assert "## Train your model" in text
    assert "| find a problem | debugging, faults," in text
