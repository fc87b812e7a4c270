"""FSDP2's private names stand in one file; which of them each supported torch lacks."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_compile
from fsdp_compile._torch.fully_shard_names import ATTRIBUTES

pytestmark = pytest.mark.core
PACKAGE = Path(fsdp_compile.__file__).parent
NAMES = PACKAGE / "_torch" / "fully_shard_names.py"
USERS = [path for path in NAMES.parent.glob("fully_shard*.py") if path != NAMES]
_NEW_IN_2_15 = (
    "_has_sharded_grad_dtype_override",
    "_post_backward_pending",
    "keep_unsharded_storage",
    "sharded_grad_dtype",
    "unsharded_grad_dtype",
)
LACKS = {
    "2.11": {
        "ShardPlacementResult",
        "_dp_dim_indices",
        "_reset_iter_state",
        *_NEW_IN_2_15,
        "_fsdp_param_groups",
        "_set_separate_reduce_scatter_group",
        "_unsharded_dtensor_spec",
        "dp_mesh_dims",
        "is_spmd_types",
        "reduce_scatter_max_input_buffers",
        "reduce_scatter_process_group",
        "reduce_scatter_unused_params",
        "spmd_mesh",
    },
    "2.13": {"_tp_spec", "is_spmd_types", *_NEW_IN_2_15},
    "2.14": {"_tp_spec", *_NEW_IN_2_15},
    "2.15": {"_tp_spec"},
}
"""What a version does not have, of what others have; the files that use it say what takes its place."""


def _names_of(owner: Any) -> set[str]:
    """Attributes of a module, or of a class and its objects."""
    found = set(dir(owner))
    for each in owner.__mro__[:-1] if isinstance(owner, type) else ():
        found |= {*inspect.get_annotations(each), *re.findall(r"\bself\.(\w+)", inspect.getsource(each))}
    return found


def _used(path: Path) -> set[str]:
    """Names of attributes in a file, also of those that it reads by `getattr` and the like."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return attributes | {text for text in texts if text.isidentifier()}


def test_what_this_torch_lacks() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    lacking = {name for owner, names in ATTRIBUTES.items() for name in set(names.split()) - _names_of(owner)}
    assert lacking == LACKS.get(version, lacking)


def test_every_private_attribute_is_listed_and_used() -> None:
    listed = {name for names in ATTRIBUTES.values() for name in names.split()}
    used = set().union(*map(_used, USERS))
    assert listed - used == set()
    private = {name for owner in ATTRIBUTES for name in _names_of(owner) if re.match(r"_[a-z]", name)}
    assert used & private - listed - set(dir(torch.nn.Module())) == set()


def test_no_other_file_imports_private_names_of_fsdp2() -> None:
    private = re.compile(r"^\s*from torch\.distributed\.(fsdp\._|_composable)", re.MULTILINE)
    assert [path for path in PACKAGE.rglob("*.py") if private.search(path.read_text())] == [NAMES]
