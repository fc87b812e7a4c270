"""Figures of matplotlib, which draw without a display and without global state."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from fsdp_compile.errors import ConfigError


def new_figure(where: str, inches: tuple[float, float]) -> Any:
    """An empty figure.

    Args:
        where: The call that an error names.
        inches: Width and height.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture takes matplotlib, which is not installed",
            where=where,
            instead="pip install 'fsdp-compile[plot]', or the numbers as data",
        )
    from matplotlib.figure import Figure

    return Figure(figsize=inches, layout="constrained")
