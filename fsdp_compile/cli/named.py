"""Functions that a command line names, as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from fsdp_compile.errors import ConfigError


def named_function(path: str, contract: str) -> Callable[..., Any]:
    """The function that a path names.

    Args:
        path: What the user wrote.
        contract: What it should be, for errors.

    Raises:
        ConfigError: If there is none.
    """
    module_name, _, name = path.partition(":")
    instead = f"package.module:function, {contract}"
    if not module_name or not name:
        raise ConfigError(f"{path} does not name a module and a function", instead=instead)
    sys.path.insert(0, "")  # as `python -m` does, so that a file in the current folder is found
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot find {path}: {error}", instead=instead) from error
    if not callable(function):
        raise ConfigError(f"{path} is a {type(function).__name__}", instead=instead)
    return function
