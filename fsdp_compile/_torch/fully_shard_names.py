"""The private names of torch's FSDP2 that this package uses, all of them: what to read again for a new torch.

Only `fully_shard.py`, `fully_shard_calls.py` and `fully_shard_params.py` use them.
`tests/_torch/test_fully_shard_names.py` lists which of them the supported versions of torch lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext

__all__ = [
    "REGISTRY_KEY",
    "STATE_KEY",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "TrainingState",
    "_fsdp_common",
    "_fsdp_init",
    "_fully_shard",
    "_module_state_mapping",
]

MANAGED = "_is_fsdp_managed_module"
"""FSDP2's mark on each module of a sharded model; Dynamo guards marked modules in a way of its own."""
ORIGINAL_PARAMS = "_fsdp_use_orig_params"
"""Another one."""

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
        offload_policy post_backward post_forward_mesh_info reduce_grads reduce_scatter_max_input_buffers
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
        shard_mesh_dim shard_mesh_rank shard_mesh_size shard_process_group spmd_mesh
    """,
}
"""Attributes by what has them: modules, classes and their objects."""
