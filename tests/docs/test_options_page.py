"""`docs/options.md` has every field of `FSDPOptions` once, with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from fsdp_compile import FSDPOptions

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")


def test_the_page_has_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `([^`]*)` \|$", PAGE, flags=re.MULTILINE)
    options = FSDPOptions()
    expected: list[tuple[str, Any]] = [
        (field.name, getattr(options, field.name)) for field in dataclasses.fields(options)
    ]
    assert sorted(rows) == sorted((name, repr(value).replace("'", '"')) for name, value in expected)
