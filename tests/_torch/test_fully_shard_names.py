"""FSDP2's private names stand in three files; attributes of its objects that are used, and which each torch lacks."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext

import fsdp_compile

pytestmark = pytest.mark.core
PACKAGE = Path(fsdp_compile.__file__).parent
USERS = sorted((PACKAGE / "_torch").glob("fully_shard*.py"))
ATTRIBUTES: Mapping[Any, str] = {
    _fsdp_common: "ShardPlacementResult _is_composable_with_fsdp",
    _fsdp_init: """
        _get_device_from_mesh _get_mesh_info _get_post_forward_mesh_info _init_param_group _move_states_to_device
    """,
    _fully_shard: "_unimplemented_deepcopy get_cls_to_fsdp_cls",
    FSDPState: """
        _fsdp_param_group _fsdp_param_groups _is_root _lazy_init _modules _modules_to_run_forward _mp_policy
        _post_forward_hook_handle _pre_forward_hook_handle _register_root_post_backward_final_callback _state_ctx
        _states_to_backward_prefetch _states_to_forward_prefetch _training_state
    """,
    FSDPStateContext: "all_states is_last_backward iter_forward_root post_optim_event",
    FSDPParamGroup: """
        _all_gather_comm _all_gather_result _all_reduce_hook _init_mp_dtypes _is_hsdp _partial_reduce_output
        _post_backward_pending _reduce_scatter_comm _reset_iter_state _set_separate_reduce_scatter_group
        _to_sharded _training_state _validate_cpu_offload_params _validate_no_meta_params all_reduce_grads
        force_sum_reduction_for_comms fsdp_params gradient_divide_factor is_sharded mesh_info modules
        post_backward post_forward_mesh_info reduce_grads reduce_scatter_max_input_buffers
        reduce_scatter_unused_params reshard_after_backward unshard wait_for_unshard
    """,
    FSDPParam: """
        _dp_dim_indices _get_grad_inner_tensor _has_sharded_grad_dtype_override _module_info _orig_size
        _sharded_local_tensor _sharded_param_data _sharded_post_forward_param _tp_spec _unsharded_dtensor_spec
        _unsharded_inner_tensors _unsharded_param all_gather_outputs fsdp_placement is_spmd_types
        keep_unsharded_storage offload_to_cpu orig_dtype padded_sharded_param_size param_dtype pin_memory reduce_dtype
        sharded_grad_dtype sharded_param unsharded_accumulated_grad unsharded_grad_dtype
    """,
    ParamModuleInfo: "module param_name shared_modules shared_param_names",
    HSDPMeshInfo: """
        dp_mesh_dims mesh reduce_scatter_process_group replicate_mesh_dim replicate_mesh_size replicate_process_group
        shard_mesh_dim shard_mesh_size shard_process_group spmd_mesh
    """,
}
"""What the package reads and changes, by what has it: attributes of modules, classes and their objects."""
_NEW_IN_2_15 = """
    _has_sharded_grad_dtype_override _post_backward_pending keep_unsharded_storage sharded_grad_dtype
    unsharded_grad_dtype
"""
_NEW_SINCE_2_11 = """
    ShardPlacementResult _dp_dim_indices _fsdp_param_groups _reset_iter_state _set_separate_reduce_scatter_group
    _unsharded_dtensor_spec dp_mesh_dims is_spmd_types reduce_scatter_max_input_buffers reduce_scatter_process_group
    reduce_scatter_unused_params spmd_mesh
"""
LACKS = {
    "2.11": {*_NEW_SINCE_2_11.split(), *_NEW_IN_2_15.split()},
    "2.13": {"_tp_spec", "is_spmd_types", *_NEW_IN_2_15.split()},
    "2.14": {"_tp_spec", *_NEW_IN_2_15.split()},
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
    return attributes | {part for text in texts for part in text.split(".") if part.isidentifier()}


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
    assert sorted(path for path in PACKAGE.rglob("*.py") if private.search(path.read_text())) == USERS
