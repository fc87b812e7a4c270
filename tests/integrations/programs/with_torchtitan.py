"""torchtitan's Llama 3 as its trainer builds it: parallelized by torchtitan, or by a function with its signature."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import fsdp_compile
from tests.integrations.programs.report import report, run


def parallelize_llama(
    model: Any,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> Any:
    """torchtitan's `parallelize_fn` for data parallelism: each block is a unit, and compiled alone."""
    if parallel_dims.tp_enabled or parallel_dims.cp_enabled or parallelism.spmd_backend != "partial_dtensor":
        raise ValueError("only data parallelism, with parallelism.spmd_backend='partial_dtensor'")
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(names)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    for block in model.layers.values():
        fsdp_compile.fully_shard(block, mesh=mesh, mp_policy=policy)
        if compile_config.enable:
            block.compile(backend="fsdp", fullgraph=True, options={"lower": "eager"})
    fsdp_compile.fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # its loss is divided by the tokens of all ranks
    return model


def main(how: str, dtype: Any) -> None:
    """Trains four steps and reports losses, gradient norms and the norms of the full parameters."""
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"  # what torchtitan finds is "cuda", without a GPU too
    spec = model_registry("debugmodel")
    config: Any = spec.model
    del config.layers[2:]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on a CPU
    with torch.device("meta"):
        model: Any = config.build()
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    parallelize = parallelize_llama if how == "fsdp" else spec.parallelize_fn
    model = parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=True, backend="aot_eager"),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(4):
        rows = torch.randint(0, 2048, (2, 33), generator=generator)
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()) / 2
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        found.append({"loss": total.item(), "norm": norm.full_tensor().item()})
    report([*found, {name: value.full_tensor().norm().item() for name, value in model.named_parameters()}])


if __name__ == "__main__":
    run(main)
