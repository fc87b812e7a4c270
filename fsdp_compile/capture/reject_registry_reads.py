"""Refuses to shard a model whose compiled code takes parameters out of `module._parameters`, which will hold shards.

Dynamo traces plain models as they are, and reads `self.weight` and `self._parameters["weight"]` alike. The line that
uses the parameter tells them apart, if it does both; otherwise torch refuses to compute with shards.
"""

from __future__ import annotations

import re

from torch import fx

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import source_frame
from fsdp_compile.modules.stored_shards import INSTEAD

_REGISTRY = re.compile(r"\._parameters\b")


def refuse_registry_reads(parameter: fx.Node) -> None:
    """Raises `UnsupportedModelError` if the line that uses a parameter takes it from where it is registered."""
    for use in parameter.users:
        frame = source_frame(use)
        if frame is not None and frame.is_users and _REGISTRY.search(frame.code):
            raise UnsupportedModelError(
                "a forward computes with what `_parameters` has, the stored shards of a parameter",
                where=str(frame),
                instead=INSTEAD,
            )
