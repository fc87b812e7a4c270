"""The Python blocks of each page run, in their order and in one namespace.

`prelude.py` has the names that they take for granted. Those of README and guide continue one script, which
`test_examples.py` runs.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.docs import prelude
from tests.models.context_parallel import cpu_kernels
from tests.ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")) if page.stem != "guide"}
LEFT_OUT = {
    "from torchft": "it needs torchft and its server: `tests/integrations/test_torchft.py` runs such a program",
    "from torchtitan": "it needs torchtitan: `tests/integrations/test_frameworks.py` runs this function",
}
"""A text in each block that is not run, and why."""
_SHARDS = re.compile(r"fully_shard|torch\.compile|explain\(|plan\(")
"""Where a section begins with a plain model: others take one that is sharded for granted."""
_PIECES = re.compile(r"^#+ ([^\n]*)|^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _sections(text: str) -> list[tuple[str, str]]:
    """Headings of a page with the code below each, which stands on its line of the page."""
    sections = [("", "")]
    for piece in _PIECES.finditer(text):
        heading, language, block = piece.groups()
        if heading is not None:
            sections.append((heading, ""))
        elif language == "python" and not any(word in block for word in LEFT_OUT):
            heading, code = sections[-1]
            lines = text.count("\n", 0, piece.start(3)) - code.count("\n")
            sections[-1] = heading, code + "\n" * lines + block
    return [(heading, code) for heading, code in sections if code]


def _without_inductor(code: str) -> str:
    code = code.replace('backend="fsdp")', 'backend="fsdp", options={})')
    return code.replace('backend="fsdp", options={', 'backend="fsdp", options={"lower": "eager", ')


def _is_sharded(model: Any) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _run(page: str, sections: list[tuple[str, str]], folder: Path) -> None:
    """On a rank: runs each section; then the model makes a step, if the section sharded or compiled it."""
    names: dict[str, Any] = {}
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), cpu_kernels():
        prelude.set_up(page)
        for heading, code in sections:
            names |= prelude.names(heading, is_sharded=_SHARDS.search(code) is None)
            compiled = names["compiled"]
            exec(compile(_without_inductor(code), f"docs/{page}.md", "exec"), names)
            if names["compiled"] is not compiled:
                compiled = names["compiled"]
            elif _is_sharded(names["model"]):
                compiled = names["model"]
            else:
                continue
            if heading != "Context parallelism":
                for _ in range(2):
                    outputs = compiled(names["inputs"])
                    getattr(outputs, "logits", outputs).sum().backward()


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if _sections(text)])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    if page == "frameworks":
        pytest.importorskip("lightning")
    run_ranks(_run, page, _sections(PAGES[page]), tmp_path, world_size=1 if page in prelude.RANKS else 2, timeout_s=580)


def test_each_block_that_is_left_out_is_one_of_a_page() -> None:
    assert [sum(text.count(word) for text in PAGES.values()) for word in LEFT_OUT] == [1] * len(LEFT_OUT)
