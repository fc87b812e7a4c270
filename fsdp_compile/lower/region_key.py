"""All that a compile depends on besides Dynamo's graph: the key under which it is stored.

What is left out of a key is silently ignored where a compile is loaded. So the key has whole records and options, and
the digest of every file of this package, and a compile that depends on more is not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import fx

from fsdp_compile._torch.inductor import looks_into_cache
from fsdp_compile._torch.stored_compiles import CAN_STORE, settings_beside_key
from fsdp_compile._torch.tensors import OpOverload, OpOverloadPacket, is_traceable_wrapper_subclass, tree_leaves
from fsdp_compile.comm import groups
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.graph import Record
from fsdp_compile.layout.hosts import ranks_per_host
from fsdp_compile.layout.spec import Update, parse
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.options import SHARDING, FSDPOptions

_NOT_OF_GRAPHS: Final = {*SHARDING, "artifacts", "inductor", "hardware"}
"""Options that change no graph, or are in another part of the key, or are a reason not to store."""
_KNOWN_OPERATORS: Final = {"aten", "prim", "prims", "_c10d_functional", "_c10d_functional_autograd", "fsdp_compile"}
"""Namespaces of operators whose code is in the key: by the version of torch, or by the files of this package."""


def region_key(
    gm: fx.GraphModule,
    flats: Mapping[int, Record],
    inputs: Sequence[object],
    options: FSDPOptions,
    plan: Sequence[str],
    *,
    whole: bool,
) -> str | None:
    """The key of a compile, equal on all ranks that make the same graphs; `None` if it is not stored.

    Args:
        gm: Dynamo's graph.
        flats: Records of Dynamo's inputs that are parameter groups, or belong to one.
        inputs: Its inputs.
        options: Of the compile.
        plan: The collectives of a plan that its graphs follow.
        whole: Whether the graph is all of the model.
    """
    # Artifacts are written by a compile; segments are compiled one by one; an estimate is a function of this process.
    hardware = options.planned_for
    estimates = hardware is not None and hardware.device.estimate is not None
    stays_whole = options.lower == "inductor" and options.artifacts is None and not options.share_code
    are_stored = CAN_STORE and looks_into_cache(options.inductor) and stays_whole and not estimates
    if not are_stored or not _can_be_stored(gm, inputs):
        return None
    specs = [spec for record in flats.values() for spec in record.specs]
    aliases = sorted({a for s in specs for a in (s.group, s.replicate_group, s.post_forward_group, s.reduce_group)})
    chosen = [(f.name, getattr(options, f.name)) for f in dataclasses.fields(options) if f.name not in _NOT_OF_GRAPHS]
    parts = (
        _package_digest(),
        sorted(flats.items()),
        chosen,
        plan,
        whole,
        [(alias, groups.rank_store(alias) is not None) for alias in aliases if alias],
        _hardware(hardware),
        settings_beside_key(),
    )
    return "\n".join(map(repr, parts))


def _can_be_stored(gm: fx.GraphModule, inputs: Sequence[object]) -> bool:
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    # Those of its checkpointed regions and branches, too.
    nodes = [node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    values = [*inputs, *(value for node in nodes for value in tree_leaves(node.meta.get("example_value")))]
    if any(isinstance(value, symbols) for value in values):
        return False  # backward is compiled when it is known which sizes are open
    if any(isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) for value in values[len(inputs) :]):
        return False  # what AOTAutograd makes of a DTensor differs between ranks (a table's rows are some of them)
    operators = [str(node.target) for node in nodes if isinstance(node.target, OpOverload | OpOverloadPacket)]
    if not _KNOWN_OPERATORS.issuperset(operator.partition(".")[0] for operator in operators):
        return False  # AOTAutograd runs an operator's fake, and the formula of its backward: code that is in no key
    reads = [node for node in nodes if node.target in (torch.ops.fsdp_compile.unshard, UNSHARD, LOOK_UP)]
    specs = [parse(next(value for value in node.args if isinstance(value, str))) for node in reads]
    # Optimizers and hooks are objects of this process.
    return all(spec.update is Update.AFTER_BACKWARD and not spec.hook for spec in specs)


def _hardware(given: Hardware | None) -> tuple[str, int | None, bool, str]:
    """What plans depend on: the device, the ranks of a host, whether float32 is rounded, all given numbers."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    # Not its own `repr`, which leaves tables of measured times out.
    numbers = "" if given is None else repr(dataclasses.asdict(given))
    return name, ranks_per_host(), torch.backends.cuda.matmul.fp32_precision == "tf32", numbers


@functools.cache
def _package_digest() -> str:
    """Stands for the code of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
