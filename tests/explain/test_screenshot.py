"""The page in a real browser, which must draw it and report no error."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from fsdp_compile.explain.api import explain
from tests.explain.models import Stack, on_meta

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for found in map(shutil.which, _NAMES) if found), None)

pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(_NAMES)} is installed"),
]


def _browse(page: Path, profile: Path, *what: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1100",
        "--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}", *what, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    model, x = on_meta(Stack)
    return explain(model, x, world_size=64, options={"lower": "eager"}).save_html(tmp_path / "plan.html")


def test_the_script_draws_lanes_curve_and_tables(written: Path, tmp_path: Path) -> None:
    browsed = _browse(written, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in browsed.stderr  # errors of the script are logged there
    dom = browsed.stdout
    timeline = re.search(r'<svg id="timeline".*?</svg>', dom, re.DOTALL)
    memory = re.search(r'<svg id="memory".*?</svg>', dom, re.DOTALL)
    assert timeline is not None
    assert memory is not None
    assert len(re.findall(r"<rect[^>]*data-transfer", timeline[0])) >= 6
    assert len(re.findall(r"<rect[^>]*data-span", timeline[0])) >= 2
    assert "<polygon" in memory[0]
    assert "peak" in memory[0]
    assert dom.count("data-row=") >= 6
    assert "NaN" not in timeline[0] + memory[0]
    assert "undefined" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


def test_a_screenshot_is_not_blank(written: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    _browse(written, tmp_path / "profile", f"--screenshot={picture}")
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1400, 1100)
    assert len(data) > 40_000  # an empty page compresses to a few thousand bytes
