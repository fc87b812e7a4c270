"""What FSDP2 and Inductor let users set, one row each: a name that a newer torch adds fails here until it has one.

A row names the test that runs it in compiled steps, or says after `torch's:` why such a step has nothing to do with it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp
from torch._inductor import config
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_compile.lower.inductor import KEEP_OUR_ORDER

pytestmark = pytest.mark.core
TESTS = Path(__file__).parents[1]

_POLICIES = "fsdp2/test_settings.py::test_numbers_of_each_policy"
_REDUCTIONS = "fsdp2/test_settings.py::test_numbers_are_those_of_fsdp2"
_HOOKS = "fsdp2/test_settings.py::test_such_a_unit_goes_by_hooks"
_CASTS = "sharding/test_mixed_precision.py::test_inner_units_cast_their_inputs_by_their_own_policy"
_PREFETCH = "numerics/one_process/test_rules.py::test_a_list_may_overtake_and_can_be_taken_back"
_MESHES = "fsdp2/test_meshes.py::test_dimensions_of_a_whole_mesh"
_FINALIZE = "fsdp2/test_settings.py::test_backwards_that_the_caller_ends"
_ARGUMENTS = """
    module mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params dp_mesh_dims
"""
ROWS: Mapping[str, Mapping[str, str]] = {
    "MixedPrecisionPolicy": {
        "param_dtype": _POLICIES,
        "reduce_dtype": _POLICIES,
        "output_dtype": _CASTS,
        "cast_forward_inputs": _CASTS,
        "param_dtype_override_fn": _POLICIES,
    },
    "CPUOffloadPolicy": {"pin_memory": _REDUCTIONS},
    "OffloadPolicy": {},
    "fully_shard": dict.fromkeys(_ARGUMENTS.split(), "torch's: its call has run before a model is taken over"),
    "DataParallelMeshDims": dict.fromkeys(("shard", "replicate"), _MESHES),
    "FSDPModule": {
        "finalize_backward": _FINALIZE,
        "reset_iter_state": "fsdp2/test_settings.py::test_a_reset_drops_what_waits",
        "reshard": "torch's: it frees what FSDP2 has gathered",
        "set_all_reduce_hook": _HOOKS,
        "set_allocate_memory_from_process_group_for_comm": _HOOKS,
        "set_custom_all_gather": _HOOKS,
        "set_custom_reduce_scatter": _HOOKS,
        "set_force_sum_reduction_for_comms": _REDUCTIONS,
        "set_gradient_divide_factor": _REDUCTIONS,
        "set_is_last_backward": (
            "numerics/one_process/test_accumulation.py::test_each_backward_hands_gradients_over_as_fsdp2_does"
        ),
        "set_keep_unsharded_storage": _HOOKS,
        "set_manual_backward_finalization": _FINALIZE,
        "set_modules_to_backward_prefetch": _PREFETCH,
        "set_modules_to_forward_prefetch": _PREFETCH,
        "set_post_optim_event": "fsdp2/test_settings.py::test_gathers_wait_for_the_optimizers_event",
        "set_reduce_scatter_divide_factor": "torch's: it calls set_gradient_divide_factor()",
        "set_reduce_scatter_max_input_buffers": _HOOKS,
        "set_reduce_scatter_unused_params": _REDUCTIONS,
        "set_requires_all_reduce": _REDUCTIONS,
        "set_requires_gradient_sync": _POLICIES,
        "set_reshard_after_backward": _REDUCTIONS,
        "set_reshard_after_forward": _REDUCTIONS,
        "set_separate_reduce_scatter_group": _REDUCTIONS,
        "set_symm_mem_for_comm": "torch's: as set_custom_all_gather()",
        "set_unshard_in_backward": "fsdp2/test_settings.py::test_no_gather_in_backward",
        "unshard": "fsdp2/test_cases.py::test_like_fsdp2",
    },
}
SWITCHES = """
    _fuse_ddp_communication _micro_pipeline_tp allow_comms_decompositions auto_select bucket_all_gathers_fx
    bucket_all_reduces_fx bucket_reduce_scatters_fx collective_bucketing enable_low_contention_collectives
    enable_overlap_scheduling enable_simple_overlap insert_overlap_deps low_contention_all_gather_ce_multicast
    reorder_for_compute_comm_overlap reorder_for_locality reorder_for_locality_in_training reorder_for_peak_memory
"""
"""Settings by which Inductor moves, joins or replaces collectives: off in compiles of this package."""
AMOUNTS = """
    _fuse_ddp_bucket_size _fuse_ddp_communication_passes bucket_all_gathers_bucket_mode
    bucket_all_gathers_fx_bucket_size_determinator bucket_all_reduces_fx_bucket_size_determinator
    bucket_exposed_first bucket_mode bucket_only_internode_comms bucket_reduce_scatters_bucket_mode
    bucket_reduce_scatters_fx_bucket_size_determinator collective_benchmark_nruns collective_benchmark_timeout
    collective_estimator compute_estimator compute_overlap_multipler custom_runtime_estimation enable_fusion_regions
    log_final_collectives_estimations low_contention_min_bytes_per_rank low_contention_skip_overlap_check
    max_coll_distance max_compute_pre_fetch max_in_flight_gb max_memory_increase_gb max_memory_increase_ratio
    min_overlap_ratio one_shot_all_reduce_threshold_bytes overlap_scheduling_autofix_cycles
    pre_bucketing_fsdp_collectives pre_bucketing_fsdp_collectives_bucket_cap_mb
    pre_bucketing_fsdp_collectives_max_bucket_cap_mb pre_bucketing_fsdp_collectives_min_bucket_cap_mb
    pre_bucketing_fsdp_collectives_saturation_calibration_multiplier pre_bucketing_fsdp_collectives_verbose
    prioritize_bucketing_during_scheduling profile_guided_estimations_profile_path
    reorder_for_compute_comm_overlap_passes reorder_for_peak_memory_debug reorder_prefetch_limit spmd_check
    spmd_mismatch
"""
"""How these work where they are on."""


def _offered() -> dict[str, set[str]]:
    dims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", OffloadPolicy)  # not in torch 2.11
    classes = (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy, dims)
    policies = {each.__name__: {field.name for field in dataclasses.fields(each)} for each in classes}
    methods = {name for name, value in vars(FSDPModule).items() if inspect.isfunction(value) and name[0] != "_"}
    return {**policies, "fully_shard": set(inspect.signature(fully_shard).parameters), "FSDPModule": methods}


def test_each_has_a_row() -> None:
    assert {(owner, name) for owner, names in _offered().items() for name in names - set(ROWS[owner])} == set()


def test_rows_name_tests_or_reasons() -> None:
    for row in {row for rows in ROWS.values() for row in rows.values()}:
        if not row.startswith("torch's: "):
            file, name = row.split("::")
            assert re.search(rf"def {name}\b", (TESTS / file).read_text()), row


def _settings() -> dict[str, tuple[str, Any]]:
    """By name, with the name by which compiles change it: those of the scheduler and of collectives."""
    about = re.compile(r"_?(\w+_)?(overlap|comm|communication|bucket|collective|reorder|pipeline)(_\w+)?$")
    found = {name: (name, value) for name, value in inspect.getmembers(config) if about.match(name)}
    for owner in (found.pop("_collective")[1], config.aten_distributed_optimizations):
        own = {name: value for name, value in vars(owner).items() if name[0] != "_"}
        found |= {name: (f"{owner.__name__}.{name}", value) for name, value in own.items()}
    return found


def test_inductor_moves_no_collective() -> None:
    settings = _settings()
    assert set(settings) - set(SWITCHES.split()) - set(AMOUNTS.split()) == set()
    on = {name for name in SWITCHES.split() if name in settings and settings[name][1] not in (False, None, "none")}
    assert {name for name in on if KEEP_OUR_ORDER.get(settings[name][0]) is not False} == set()
