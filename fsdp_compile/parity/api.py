"""`check_parity`: trains the compiled model and a reference, and compares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.errors import ConfigError, ParityError
from fsdp_compile.options import FSDPOptions
from fsdp_compile.parity.compare import ParityReport, describe
from fsdp_compile.parity.experiment import (
    Accumulation,
    Experiment,
    Level,
    LossFn,
    OptimizerFn,
    PrepareFn,
    Reference,
    mean_loss,
)
from fsdp_compile.parity.processes import run_on_ranks
from fsdp_compile.parity.train import first_stop_that_differs, train_both
from fsdp_compile.pipeline import CAPTURE, passes

_OWN: Final = ("mesh", "mp_policy", "reshard_after_forward", "auto_wrap_policy", "stop_after")
"""Options that both sides need, or that bisection sets."""


def check_parity(  # noqa: PLR0913  one call says everything about a comparison
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    *,
    world_size: int = 2,
    reference: Reference | Literal["single", "ddp", "fsdp2", "fsdp1"] = Reference.FSDP2,
    level: Level | Literal["bitwise", "tolerance"] = Level.BITWISE,
    steps: int = 3,
    loss: LossFn = mean_loss,
    optimizer: OptimizerFn | None = None,
    options: Mapping[str, Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    replicas: int = 1,
    prepare: PrepareFn | None = None,
    micro_batches: int = 1,
    accumulation: Accumulation | Literal["reduce-each", "hold"] = Accumulation.REDUCE_EACH,
    bisect: bool = False,
    seed: int = 0,
    timeout_s: float = 300,
) -> ParityReport:
    """Trains a model compiled with `backend="fsdp"` and an eager reference, and compares all their numbers.

    Both start from the same seed, on `world_size` new processes of this host, with gloo on CPU, or with NCCL
    where every rank has a GPU. Every step's losses, gradients, parameters and optimizer state are compared unsharded,
    and the buffers of the first rank.

    Args:
        make_model: Makes the model. This and the other functions must be importable by a new process: functions of a
            module, or of a script below whose `if __name__ == "__main__":` this is called.
        make_batch: From the number of a step to the batch of all ranks. Tensors are split along dimension 0, first
            over ranks and then over micro-batches. A tuple becomes the model's positional arguments, a mapping its
            keyword arguments. Each rank calls it, with torch's generators seeded alike.
        world_size: Number of ranks.
        reference: What to compare with: one process on the whole batch, DDP, FSDP2 or FSDP1.
        level: "bitwise" for equal bits, through `lower="eager"`; "tolerance" for bounds that `docs/parity.md` derives,
            through Inductor. `options={"lower": ...}` overrules.
        steps: Optimizer steps.
        loss: From model and share of a batch to the mean loss over the share's rows. By default the model's own loss,
            or the mean square of its output.
        optimizer: From parameters to an optimizer. By default AdamW bitwise, SGD with momentum for "tolerance".
        options: Options of the compile, as for `torch.compile`.
        mp_policy: As for `fully_shard`, for both sides.
        reshard_after_forward: As for `fully_shard`, for both sides.
        replicas: Ranks with the same shard: more than 1 for hybrid sharding.
        prepare: Called with the model and either side's `fully_shard`, to shard it as your script does, instead of the
            three arguments above.
        micro_batches: Backward passes per step, each with its share of a rank's rows.
        accumulation: "reduce-each" reduces after every backward pass, "hold" once per step, after the last
            (`no_sync` here and in DDP and FSDP1, `set_requires_gradient_sync` of FSDP2).
        bisect: Whether to find out which pass introduced a difference, by running the passes before it alone.
        seed: Of the model, of batches that are drawn, and of dropout.
        timeout_s: For every collective.

    Returns:
        The report, if the two are equal.

    Raises:
        ParityError: If they are not; it names the first parameter and step, and has the report as `.report`.
        ConfigError: For a wrong argument, or a function that another process cannot import.
        RankFailedError: If a rank fails, with that rank's traceback.
    """
    if prepare is not None and (mp_policy is not None or not reshard_after_forward or replicas != 1):
        raise ConfigError(
            "prepare shards the model, and mp_policy, reshard_after_forward and replicas say how it is sharded, too",
            where="check_parity(prepare=...)",
            instead="these arguments in the calls of fully_shard inside prepare",
        )
    experiment = Experiment(
        make_model=make_model,
        make_batch=make_batch,
        world_size=world_size,
        reference=_member(Reference, reference, "reference"),
        level=_member(Level, level, "level"),
        steps=steps,
        loss=loss,
        optimizer=optimizer,
        options=_checked(options),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward=reshard_after_forward,
        replicas=replicas,
        prepare=prepare,
        micro_batches=micro_batches,
        seed=seed,
        timeout_s=timeout_s,
        accumulation=_member(Accumulation, accumulation, "accumulation"),
    )
    report = measure(experiment)
    if report.equal:
        return report
    if bisect:
        # The first pass that, run with those before it and none after it, makes a difference.
        names = [one.name for one in passes(FSDPOptions.from_dict(experiment.options))]
        stopped = {
            name: dataclasses.replace(experiment, options={**experiment.options, "stop_after": name})
            for name in [CAPTURE, *names[:-1]]
        }
        culprit = _on_ranks(first_stop_that_differs, stopped, experiment) or names[-1]
        report = dataclasses.replace(report, introduced_by=culprit)
    assert report.first is not None
    where = None if report.introduced_by is None else f"introduced by {report.introduced_by}"
    error = ParityError(describe(report.first), where=where)
    error.report = report
    raise error


def measure(experiment: Experiment) -> ParityReport:
    """Runs one comparison and reports it, equal or not."""
    name = getattr(experiment.make_model, "__qualname__", type(experiment.make_model).__name__)
    title = (
        f"{name}: compiled (lower={experiment.lower}) against {experiment.reference.value}, "
        f"{experiment.world_size} ranks on {experiment.device_type}, {experiment.level.value}"
    )
    found = _on_ranks(train_both, experiment, experiment)
    return ParityReport(title=title, level=experiment.level.value, steps=experiment.steps, differences=tuple(found))


def _on_ranks(fn: Callable[[Any], Any], argument: Any, of: Experiment) -> Any:
    """Calls `fn(argument)` on the ranks of an experiment."""
    return run_on_ranks(fn, argument, of.world_size, device_type=of.device_type, timeout_s=of.timeout_s)


def _member(kind: Any, value: Any, name: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{name} cannot be {value!r}", where=f"check_parity({name}=...)", instead=allowed) from None


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict(options or {})
    FSDPOptions.from_dict(given)
    for name in _OWN:
        if name in given:
            instead = "bisect=True" if name == "stop_after" else "the argument of check_parity, which both sides get"
            raise ConfigError(
                f"option {name!r} is not for this call", where="check_parity(options=...)", instead=instead
            )
    return given
