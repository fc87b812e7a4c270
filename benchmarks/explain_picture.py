"""The picture of docs/explain.md, `docs/explain.png`: the page of a plan in a browser.

`python -m benchmarks.explain_picture` writes it, with the first browser of Chromium's kind that is on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from benchmarks.command import quiet
from benchmarks.models import llama_3_8b

PICTURE = Path(__file__).parents[1] / "docs" / "explain.png"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> int:
    """Plans Llama-3-8B on 64 ranks, and takes a picture of the page."""
    quiet()
    browser = next((found for found in map(shutil.which, _BROWSERS) if found), None)
    if browser is None:
        print(f"no browser: none of {', '.join(_BROWSERS)} is installed", file=sys.stderr)
        return 1
    model, args, kwargs = llama_3_8b()
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    plan = fsdp_compile.explain(model, *args, **kwargs, world_size=64, options=options)
    with tempfile.TemporaryDirectory() as folder:
        page = plan.save_html(Path(folder) / "plan.html")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,900"]
        flags += [f"--user-data-dir={folder}/profile", f"--screenshot={PICTURE}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=300)
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
