"""Methods of FSDP2's modules that have nothing to act on here: each says why, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch.distributed.fsdp import FSDPModule

from fsdp_compile.errors import ConfigError

_IN_THE_GRAPH = "collectives are nodes of the compiled graphs"


class RefusedMethods(FSDPModule):
    """Methods of `FSDPModule` that raise `ConfigError`; those that switch something off do nothing."""

    def set_custom_all_gather(self, comm: object) -> NoReturn:  # noqa: ARG002
        """Refused: no object can take the place of an all-gather."""
        raise _refused(
            "set_custom_all_gather", _IN_THE_GRAPH, "the all-gathers of the graph, or MixedPrecision(gather_dtype=...)"
        )

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:  # noqa: ARG002
        """Refused: no object can take the place of a reduce-scatter."""
        raise _refused("set_custom_reduce_scatter", _IN_THE_GRAPH, "fsdp_compile.register_comm_hook(model, hook)")

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],  # noqa: ARG002
        *,
        stream: torch.cuda.Stream | None = None,  # noqa: ARG002
    ) -> NoReturn:
        """Refused: nothing of the user's runs on what a reduce-scatter has returned."""
        raise _refused(
            "set_all_reduce_hook",
            _IN_THE_GRAPH,
            "a mesh (replicate, shard), which reduces over the replicas, too, or "
            "fsdp_compile.register_comm_hook(model, hook)",
        )

    def set_reduce_scatter_unused_params(
        self,
        reduce_scatter_unused_params: bool,  # noqa: FBT001
        *,
        recurse: bool = True,  # noqa: ARG002
    ) -> None:
        """Refused unless it is False: a graph reduces the parameters that it reads, the same ones on every rank."""
        if flag(reduce_scatter_unused_params, "set_reduce_scatter_unused_params"):
            raise _refused(
                "set_reduce_scatter_unused_params(True)",
                "every rank has to read the same parameters in the same order",
                "a call of each module on every rank, with no rows where there are none",
            )

    def set_reduce_scatter_max_input_buffers(
        self,
        max_input_buffers: int,
        *,
        recurse: bool = True,  # noqa: ARG002
    ) -> None:
        """Refused unless it is 1: how many reductions run at once is planned for each graph."""
        if isinstance(max_input_buffers, bool) or max_input_buffers != 1:
            raise _refused(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers!r})",
                "how many reductions run at once is planned for each graph",
                "options={'memory_budget_gb': ...}, within which more of them run at once",
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:  # noqa: FBT001
        """Refused unless it is False: messages are tensors of the graph, which its compiler allocates."""
        if flag(enable, "set_allocate_memory_from_process_group_for_comm"):
            raise _refused(
                "set_allocate_memory_from_process_group_for_comm(True)",
                "messages are tensors of the graph, which its compiler allocates",
                "the call left out",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused: messages are tensors of the graph, which its compiler allocates."""
        raise _refused(
            f"set_symm_mem_for_comm({backend!r})",
            "messages are tensors of the graph, which its compiler allocates",
            "the call left out",
        )


def flag(value: object, method: str) -> bool:
    """`value`, the argument of a method; raises `ConfigError` if it is no bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} is no flag", where=f"{method}()", instead="True or False")
    return value


def _refused(method: str, why: str, instead: str) -> ConfigError:
    return ConfigError(f"a module sharded by fsdp_compile cannot do that: {why}", where=method, instead=instead)
