"""The page in a real browser, which must draw it and report no error."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.models.round_sizes import explained

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
    return explained(world_size=64, bucket_mb=0).save_html(tmp_path / "plan.html")


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


_HOVER = """
<script>
const over = (element, dx) => {
  const box = element.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.left + dx, clientY: box.top + 2 };
  element.dispatchEvent(new PointerEvent("pointermove", at));
  document.body.insertAdjacentHTML("beforeend", `<pre class="told">${document.getElementById("tip").innerText}</pre>`);
};
over(document.querySelector("[data-transfer]"), 1);
over(document.querySelector("[data-span]"), 1);
over(document.querySelector("#memory polygon"), 300);
const bars = () => document.querySelectorAll("#timeline rect").length, before = bars();
const timeline = document.getElementById("timeline");
const turn = { deltaY: -500, clientX: timeline.getBoundingClientRect().left + 100, cancelable: true };
for (let i = 0; i < 8; i++) timeline.dispatchEvent(new WheelEvent("wheel", turn));
const zoomed = bars();
timeline.dispatchEvent(new MouseEvent("dblclick"));
document.body.insertAdjacentHTML("beforeend", `<pre class="bars">${before} ${zoomed} ${bars()}</pre>`);
</script>
"""


def test_hovering_tells_details_and_the_wheel_zooms(written: Path, tmp_path: Path) -> None:
    hovered = tmp_path / "hovered.html"
    page, end, rest = written.read_text(encoding="utf-8").rpartition("</body>")
    hovered.write_text(page + _HOVER + end + rest, encoding="utf-8")
    browsed = _browse(hovered, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in browsed.stderr
    drawn = re.sub(r"<script.*?</script>", "", browsed.stdout, flags=re.DOTALL)
    transfer, span, memory = re.findall(r'<pre class="told">(.*?)</pre>', drawn, re.DOTALL)
    for word in ("all-gather of blocks.0", "on the link", "starts", "waited for", "last used", "freed"):
        assert word in transfer
    assert "TFLOP" in span
    assert "live" in memory
    assert "sharded parameters" in memory
    bars = re.search(r'<pre class="bars">(\d+) (\d+) (\d+)</pre>', drawn)
    assert bars is not None
    before, zoomed, after = map(int, bars.groups())
    assert before == after > zoomed > 0


def test_a_screenshot_is_not_blank(written: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    _browse(written, tmp_path / "profile", f"--screenshot={picture}")
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1400, 1100)
    assert len(data) > 40_000  # an empty page compresses to a few thousand bytes
