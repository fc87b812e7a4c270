"""One comparison: a frozen description that every rank gets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from fsdp_compile.config.choices import Accumulation, Level, Reference, check_counts
from fsdp_compile.errors import ConfigError

LossFn = Callable[[nn.Module, Any], torch.Tensor]
OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
PrepareFn = Callable[[nn.Module, Callable[..., nn.Module]], object]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer of bitwise comparisons: AdamW at a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer of comparisons within bounds: SGD with momentum, whose steps are linear in gradients.

    AdamW divides a gradient by its own size, so that an element whose gradient is rounding noise moves by a whole
    learning rate in a direction that noise decides: no bound on parameters follows from one on gradients.
    """
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The default loss of one share of a batch.

    What the model returns if it is a scalar or has one as `.loss`; else the mean square of its output (or of its
    `.logits`, or of the first item of a tuple), in float32.

    Raises:
        ConfigError: If the model returns something else.
    """
    output = call(model, batch)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = output[0] if isinstance(output, tuple | list) else output
    tensor = getattr(first, "logits", getattr(first, "last_hidden_state", first))
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"the model returned {type(output).__name__}, and no loss is known for it",
            where="check_parity(loss=...)",
            instead="a function of (model, batch) that returns the mean loss over the batch",
        )
    return tensor if tensor.dim() == 0 else tensor.float().square().mean()


def call(model: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a tuple as positional, a mapping as keyword arguments, else one argument."""
    if isinstance(batch, tuple):
        return model(*batch)
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def split(batch: Any, parts: int) -> list[Any]:
    """Cuts a batch into equal parts along dimension 0 of its tensors; other values go to every part.

    Raises:
        ConfigError: If the rows do not divide.
    """

    def rows(tensor: torch.Tensor, part: int) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        if tensor.shape[0] % parts:
            raise ConfigError(
                f"{tensor.shape[0]} rows of a batch do not divide into {parts} equal parts",
                where="make_batch",
                instead=f"a multiple of {parts} rows (ranks times micro-batches)",
            )
        return tensor.chunk(parts)[part]

    return [tree_map_only(torch.Tensor, functools.partial(rows, part=part), batch) for part in range(parts)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One comparison; see `check_parity` for the meaning of each field."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    world_size: int = 2
    reference: Reference = Reference.FSDP2
    level: Level = Level.BITWISE
    steps: int = 3
    loss: LossFn = mean_loss
    optimizer: OptimizerFn | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009  it is frozen
    reshard_after_forward: bool = True
    replicas: int = 1
    prepare: PrepareFn | None = None
    micro_batches: int = 1
    accumulation: Accumulation = Accumulation.REDUCE_EACH
    seed: int = 0
    timeout_s: float = 300

    def __post_init__(self) -> None:
        check_counts(self.world_size, self.replicas, steps=self.steps, micro_batches=self.micro_batches)
        if self.reference is Reference.DDP and self.mp_policy != MixedPrecisionPolicy():
            raise ConfigError(
                "DDP has no mixed precision of parameters",
                where='check_parity(reference="ddp", mp_policy=...)',
                instead='reference="single", "fsdp1" or "fsdp2"',
            )
        if self.reference is Reference.FSDP1 and self.mp_policy.output_dtype is not None:
            raise ConfigError(
                "FSDP1 does not cast outputs",
                where='check_parity(reference="fsdp1", mp_policy=MixedPrecisionPolicy(output_dtype=...))',
                instead='reference="single" or "fsdp2", or a cast in the model',
            )
        if self.reference is Reference.FSDP1 and self.prepare is not None:
            raise ConfigError(
                "FSDP1 is not prepared by calls of fully_shard",
                where='check_parity(reference="fsdp1", prepare=...)',
                instead='reference="fsdp2", or leave prepare out',
            )

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a side, by default as the level needs it."""
        return (self.optimizer or (adamw if self.level is Level.BITWISE else sgd))(parameters)

    @property
    def device_type(self) -> str:
        """The kind of device of the ranks: "cuda" where each has a GPU of its own, else "cpu"."""
        return "cuda" if torch.cuda.device_count() >= self.world_size else "cpu"

    @property
    def compile_options(self) -> dict[str, Any]:
        """Options of the compiled side: for bitwise comparison with FSDP2, with reductions in its layout."""
        beside_fsdp2 = self.level is Level.BITWISE and self.reference is Reference.FSDP2
        chosen: dict[str, Any] = {"reduce_layout": "fsdp2"} if beside_fsdp2 else {}
        return {**chosen, **self.options, "lower": self.lower}

    @property
    def lower(self) -> str:
        """How the compiled graphs run."""
        return self.options.get("lower", "eager" if self.level is Level.BITWISE else "inductor")
