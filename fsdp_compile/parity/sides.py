"""The two sides of a comparison: how each is made from the user's model, and its tensors on one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import fully_shard as eager_fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from fsdp_compile.comm.groups import mesh_of_shape
from fsdp_compile.parity.compare import Quantity
from fsdp_compile.parity.experiment import Experiment, Reference
from fsdp_compile.sharding.fully_shard import fully_shard

Tensors = dict[tuple[Quantity, str], torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Side:
    """A model in training.

    Attributes:
        given: The user's model, in `model`.
        named: The optimizer's parameters, by the names that the user's model gives them.
        whole_batch: Whether it trains alone on the batches of all ranks.
    """

    model: nn.Module
    given: nn.Module
    named: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    whole_batch: bool = False

    @classmethod
    def of(cls, experiment: Experiment, model: nn.Module, given: nn.Module, *, whole_batch: bool = False) -> Side:
        """A model with the optimizer of an experiment."""
        named = {_plain(name): parameter for name, parameter in given.named_parameters()}
        optimizer = experiment.make_optimizer([p for p in named.values() if p.requires_grad])
        return cls(model, given, named, optimizer, whole_batch)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Context in which backward passes leave their gradients unsharded and unreduced on each rank."""
        model: Any = self.model
        if isinstance(model, FullyShardedDataParallel | DistributedDataParallel):
            with model.no_sync():
                yield
        elif self.whole_batch:
            yield
        else:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

    def gradients(self) -> Tensors:
        """Full gradients; a collective."""
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model, with_grads=True):
                return {
                    (Quantity.GRADIENT, _plain(n)): None if p.grad is None else p.grad.clone()
                    for n, p in self.model.named_parameters()
                }
        return {(Quantity.GRADIENT, n): None if p.grad is None else _full(p.grad) for n, p in self.named.items()}

    def state(self) -> Tensors:
        """Full parameters, optimizer state (not that of FSDP1, which is in pieces) and buffers; a collective."""
        found: Tensors = {}
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
                named = self.model.named_parameters()
                found = {(Quantity.PARAMETER, _plain(n)): p.detach().clone() for n, p in named}
        else:
            found = {(Quantity.PARAMETER, n): _full(p.detach()) for n, p in self.named.items()}
            for name, parameter in self.named.items():
                for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        found[Quantity.STATE, f"{name}.{key}"] = _full(value)
                    elif isinstance(value, int | float):
                        found[Quantity.STATE, f"{name}.{key}"] = torch.tensor(value, dtype=torch.float64)
        return found | {(Quantity.BUFFER, _plain(n)): _full(b).clone() for n, b in self.given.named_buffers()}


def compiled_side(experiment: Experiment) -> Side:
    """The compiled model."""
    model = _fresh(experiment)
    if experiment.prepare is not None:
        experiment.prepare(model, fully_shard)
    else:
        mesh, keep = _mesh(experiment), experiment.reshard_after_forward
        fully_shard(model, mesh=mesh, mp_policy=experiment.mp_policy, reshard_after_forward=keep)
    compiled: Any = torch.compile(model, backend="fsdp", options=experiment.compile_options)
    return Side.of(experiment, compiled, model)


def reference_side(experiment: Experiment, unit_names: list[str]) -> Side | None:
    """The reference; `None` on ranks that have no part in it.

    `unit_names` are the module paths of the compiled side's units: FSDP shards the same modules.
    """
    alone = experiment.reference is Reference.SINGLE
    if alone and dist.get_rank() != 0:
        return None
    model = _fresh(experiment)
    wrapped: nn.Module = model
    match experiment.reference:
        case Reference.SINGLE:
            wrapped = CastParameters(model, experiment.mp_policy)
        case Reference.DDP:
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        case Reference.FSDP2:
            _shard_with_fsdp2(experiment, model, unit_names)
        case Reference.FSDP1:
            wrapped = _wrapped_by_fsdp1(experiment, model, unit_names)
    return Side.of(experiment, wrapped, model, whole_batch=alone)


def unit_names(model: nn.Module) -> list[str]:
    """Module paths of the units of a sharded model, deepest first, without the root's."""
    given = getattr(model, "_orig_mod", model)
    names = [name for name, module in given.named_modules() if name and isinstance(module, FSDPModule)]
    return sorted(names, key=lambda name: -name.count("."))


class CastParameters(nn.Module):
    """Mixed precision without shards: forward reads every parameter in another dtype, its gradient is in its own.

    `param_dtype`, `output_dtype` and `cast_forward_inputs` of the policy are followed. Recomputation in backward reads
    the same cast parameters: they stay in their modules until the next forward.
    """

    def __init__(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.module = module
        self.policy = policy

    def forward(self, *args: object, **kwargs: object) -> object:
        """Calls the model with cast parameters and inputs."""
        dtype = self.policy.param_dtype
        if dtype is None:
            output = self.module(*args, **kwargs)
        else:
            cast = {n: p.to(dtype) if p.is_floating_point() else p for n, p in self.module.named_parameters()}
            if self.policy.cast_forward_inputs:
                args, kwargs = _cast((args, kwargs), dtype)
            # `functional_call` replaces parameters, and must not find the attributes of the forward before.
            self._show({})
            output = torch.func.functional_call(self.module, cast, args, kwargs)
            self._show(cast)
        return output if self.policy.output_dtype is None else _cast(output, self.policy.output_dtype)

    def _show(self, cast: dict[str, torch.Tensor]) -> None:
        """Lets modules read `cast`, by name of the parameter, where they would find a parameter; others read those."""
        shown = {id(p): cast.get(name) for name, p in self.module.named_parameters()}
        for module in self.module.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                value = shown[id(parameter)]
                # Attributes of an instance come before what `nn.Module` looks up among its parameters.
                if value is None:
                    module.__dict__.pop(name, None)
                else:
                    module.__dict__[name] = value


def _shard_with_fsdp2(experiment: Experiment, model: nn.Module, unit_names: list[str]) -> None:
    if experiment.prepare is not None:
        experiment.prepare(model, eager_fully_shard)  # type: ignore[arg-type]
        return
    mesh, keep = _mesh(experiment), experiment.reshard_after_forward
    # One call on our side casts inputs and outputs of the model alone: the units inside must not cast theirs.
    inner = dataclasses.replace(experiment.mp_policy, cast_forward_inputs=False, output_dtype=None)
    for name in [*_separate(model, unit_names), ""]:
        policy = inner if name else experiment.mp_policy
        eager_fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy, reshard_after_forward=keep)


def _wrapped_by_fsdp1(experiment: Experiment, model: nn.Module, unit_names: list[str]) -> nn.Module:
    chosen = {id(model.get_submodule(name)) for name in _separate(model, unit_names)}
    policy, hybrid = experiment.mp_policy, experiment.replicas > 1
    strategy = {
        (False, True): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }[hybrid, experiment.reshard_after_forward]
    mixed = MixedPrecision(policy.param_dtype, policy.reduce_dtype, cast_root_forward_inputs=policy.cast_forward_inputs)
    is_cuda = experiment.device_type == "cuda"
    return FullyShardedDataParallel(
        model,
        device_mesh=_mesh(experiment) if hybrid else None,
        sharding_strategy=strategy,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen) if chosen else None,
        mixed_precision=mixed if policy.param_dtype or policy.reduce_dtype else None,
        use_orig_params=True,
        device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
    )


def _fresh(experiment: Experiment) -> nn.Module:
    """The user's model, from the same seed on every side and rank."""
    torch.manual_seed(experiment.seed)
    return experiment.make_model().to(experiment.device_type)


def _mesh(experiment: Experiment) -> DeviceMesh:
    if experiment.replicas == 1:
        return init_device_mesh(experiment.device_type, (experiment.world_size,))
    # Not torch's `init_device_mesh`, whose groups would wait 30 minutes, whatever `timeout_s` says.
    return mesh_of_shape(experiment.device_type, (experiment.replicas, experiment.world_size // experiment.replicas))


def _separate(model: nn.Module, names: list[str]) -> Iterator[str]:
    """Units that share no parameter with the rest."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    # FSDP would untie the others, so the root takes them.
    shared = [places for places in owners.values() if len(places) > 1]
    for name in names:
        inside = [[place.startswith(f"{name}.") for place in places] for places in shared]
        if all(all(each) or not any(each) for each in inside):
            yield name


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
