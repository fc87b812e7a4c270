"""transformers' `Trainer` with models that this package shards: one callback.

`Trainer` has a way of its own for models that are sharded before it gets them: it wraps them in nothing, and every rank
takes part when it saves one. The callback takes that way.
"""

from __future__ import annotations

import functools
import math
import random
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.distributed import DistributedConfig

from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.dcp import SafePlanner, SafeReader
from fsdp_compile.formats.files import named
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.state.full_params import full_params

_STATE = "fsdp_state"
"""Folder in each of the Trainer's checkpoints: optimizer, learning rate schedule and random number generators."""
_GENERATORS = "rng-{}.pt"
_RUN = "run"
"""File in that folder that names the run which wrote it; the Trainer's own state does, too."""


class FSDPCallback(TrainerCallback):
    """Shards and compiles the model of a `Trainer`, and saves and loads what the Trainer cannot.

    The model is compiled with `model.compile(backend="fsdp")`. Call `fully_shard` on it before for other dtypes, units
    or meshes. Checkpoints have the full model in transformers' format, and the sharded optimizer state beside it, which
    loads on any number of ranks.

    Args:
        model: The model, which is sharded and compiled at once: make the callback before the Trainer.
        options: Fields of `FSDPOptions`.

    Raises:
        ConfigError: If `model` is no transformers model.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"{type(model).__name__} is not a transformers model",
                where="FSDPCallback(model)",
                instead="a PreTrainedModel; for other modules, a training loop of your own or accelerate",
            )
        if not isinstance(model, FSDPModule):
            fully_shard(model)
        model.compile(backend="fsdp", options=dict(options or {}))
        # So Trainer leaves averaging to the model, and calls `save_pretrained` on all ranks.
        model._is_distributed_loading_by_transformers = True
        model.config.distributed_config = _distribution(model)
        if model.config.distributed_config.dp_size == 1:  # transformers gathers nothing to save it
            object.__setattr__(model, "save_pretrained", functools.partial(_save_pretrained, model))
        object.__setattr__(model, "load_state_dict", functools.partial(_load_state_dict, model))
        # By it Trainer tells models whose labels it has to shift for label smoothing.
        object.__setattr__(model, "_get_name", functools.partial(str, user_class(model).__name__))
        self._model = model
        self._resumed: Path | None = None

    def on_init_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Refuses arguments that do not go with it, before the Trainer makes an optimizer."""
        if kwargs["model"] is not self._model:
            raise ConfigError(
                "the Trainer has another model than the callback",
                where="Trainer(model=..., callbacks=[FSDPCallback(model)])",
                instead="the same model in both",
            )
        _refuse(args)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Saves the state of the optimizer beside the model, every rank its own part."""
        folder = _folder(args, state)
        dcp.save(_training_state(kwargs), checkpoint_id=folder)
        _save_generators(folder)
        if dist.get_rank() == 0:
            (folder / _RUN).write_text(_run_of(state) or "")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Loads it, if the Trainer resumes."""
        resumed_run = _run_of(state)
        # The Trainer saves this dict, and leaves alone what is of no callback that it knows.
        _states_of_callbacks(state)[_STATE] = {_RUN: uuid.uuid4().hex}
        if state.global_step == 0:
            return
        folder = _folder(args, state)
        _refuse_folder(folder, args, state, resumed_run)
        loaded = _training_state(kwargs)
        _load(loaded, folder)
        set_optimizer_state_dict(kwargs["model"], _plain(kwargs["optimizer"]), loaded["optimizer"])
        kwargs["lr_scheduler"].load_state_dict(loaded["lr_scheduler"])
        self._resumed = folder

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Restores random number generators in a run that is resumed with a new epoch, whose loader draws a seed."""
        if args.ignore_data_skip or float(state.epoch or 0).is_integer():
            FSDPCallback.on_step_begin(self)  # a subclass may ask for more arguments

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Restores them in a run that is resumed within an epoch, whose loader had drawn its seed before the save."""
        if self._resumed is not None:
            _load_generators(self._resumed)
            self._resumed = None


def _save_pretrained(model: PreTrainedModel, save_directory: str | Path, **kwargs: Any) -> None:
    """`model.save_pretrained` on one rank."""
    with full_params(model, writeback=False):
        type(model).save_pretrained(model, save_directory, **kwargs)


def _load_state_dict(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`model.load_state_dict` with full values, which the Trainer reads from its checkpoint on every rank."""
    with full_params(model):
        return type(model).load_state_dict(model, *args, **kwargs)


def _distribution(model: PreTrainedModel) -> DistributedConfig:
    """What transformers goes by when it accumulates gradients and saves: on how many ranks shards and replicas are."""
    sharded = next(p for p in model.parameters() if isinstance(p, DTensor))
    mesh = sharded.device_mesh
    replicas = math.prod(
        size for size, placement in zip(mesh.shape, sharded.placements, strict=True) if placement.is_replicate()
    )
    return DistributedConfig(fsdp_size=mesh.size() // replicas, dp_replicate_size=replicas)


def _refuse(args: TrainingArguments) -> None:
    """Raises `ConfigError` for arguments by which the Trainer would shard, compile or save in a way of its own."""
    wrong = {
        "fsdp": (bool(args.fsdp), "leave it out: the callback shards the model"),
        "deepspeed": (bool(args.deepspeed), "leave it out: the callback shards the model"),
        "torch_compile": (bool(args.torch_compile), "leave it out: the callback compiles; FSDPCallback(options=...)"),
        "fp16": (bool(args.fp16), "bf16=True, or fully_shard(model, mp_policy=...) before the Trainer is made"),
        "save_on_each_node": (bool(args.save_on_each_node), "save_on_each_node=False, and a folder that all hosts see"),
        "save_only_model": (
            args.save_strategy != "no" and not args.save_only_model,
            "save_only_model=True: the Trainer would save the optimizer state of one rank; the callback saves all",
        ),
    }
    for name, (is_wrong, instead) in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} does not go with FSDPCallback",
                where=f"TrainingArguments({name}=...)",
                instead=instead,
            )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / _STATE


def _states_of_callbacks(state: TrainerState) -> dict[str, Any]:
    states: Any = state.stateful_callbacks  # typed as the list that it is made of
    assert isinstance(states, dict)
    return states


def _run_of(state: TrainerState) -> str | None:
    """The name of the run that has made a Trainer's state; none of states that were saved without the callback."""
    found: str | None = _states_of_callbacks(state).get(_STATE, {}).get(_RUN)
    return found


def _refuse_folder(folder: Path, args: TrainingArguments, state: TrainerState, run: str | None) -> None:
    """Raises `ConfigError` if `folder` has no optimizer state, or that of another run than the Trainer resumes."""
    if not folder.is_dir():
        raise ConfigError(
            f"there is no optimizer state in {folder}",
            where=f"Trainer.train(resume_from_checkpoint=...), step {state.global_step}",
            instead=f"a checkpoint that a run with FSDPCallback() wrote, in output_dir {args.output_dir!r}",
        )
    # The Trainer tells callbacks what it has loaded, but not from where.
    written_by = (folder / _RUN).read_text() if (folder / _RUN).exists() else None
    if run is not None and run != written_by:
        raise ConfigError(
            f"the Trainer resumes from a checkpoint of another run than the one that wrote {folder}",
            where="Trainer.train(resume_from_checkpoint=...)",
            instead="a checkpoint in output_dir, or a copy of the other one there",
        )


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself; the Trainer has it wrapped by accelerate."""
    return getattr(optimizer, "optimizer", optimizer)


def _training_state(given: Mapping[str, Any]) -> dict[str, Any]:
    """What one checkpoint has beside the model, from the arguments of a callback."""
    optimizer = get_optimizer_state_dict(given["model"], _plain(given["optimizer"]))
    return {"optimizer": optimizer, "lr_scheduler": given["lr_scheduler"].state_dict()}


def _load(state: dict[str, Any], folder: Path) -> None:
    """Loads a training state; nothing in its files is executed.

    Raises:
        CheckpointError: A file is damaged, or missing; on all ranks.
    """
    try:
        dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner())
    except CheckpointException as error:
        raise CheckpointError(
            named(error, "rank {rank} cannot load", folder),
            where="Trainer.train(resume_from_checkpoint=...)",
            instead="an older checkpoint",
        ) from None


def _save_generators(folder: Path) -> None:
    """Writes the state of this rank's random number generators."""
    name, key, *rest = np.random.get_state()  # noqa: NPY002  # of the generator that the Trainer seeds
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(key), *rest),  # an array would not load without pickle
        "cpu": torch.get_rng_state(),
        "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, folder / _GENERATORS.format(dist.get_rank()))


def _load_generators(folder: Path) -> None:
    """Restores them; on another number of ranks there may be none for this one, and it goes on with its own."""
    file = folder / _GENERATORS.format(dist.get_rank())
    if file.exists():
        state = torch.load(file, weights_only=True)
        random.setstate(state["python"])
        name, key, *rest = state["numpy"]
        np.random.set_state((name, key.numpy(), *rest))  # noqa: NPY002
        torch.set_rng_state(state["cpu"])
        if state["devices"]:
            torch.cuda.set_rng_state_all(state["devices"])
