"""Optimizers whose state is of every kind, for tests that save and load it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from fsdp_compile import flat_step, full_tensors, whole_step
from tests.two_sides import compile_eagerly, whole

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.05, amsgrad=True),
    "flat AdamW": lambda groups: flat_step(optim.AdamW(groups, lr=0.05)),
    "whole Adafactor": lambda groups: whole_step(optim.Adafactor(groups, lr=0.05)),
    "SGD": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9),
}


def optimizer_of(model: Any, name: str) -> optim.Optimizer:
    """Two groups with settings of their own, in another order than the model's."""
    first = [model.scale, model.frozen, *model.norm.parameters()]
    known = {id(p) for p in first}
    others = [p for p in model.parameters() if id(p) not in known]
    return OPTIMIZERS[name]([{"params": first, "lr": 0.01}, {"params": others}])


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    called = compile_eagerly(model)
    for seed in range(steps):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        called(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def all_values(model: Any, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Every value of model and optimizer, full, by name."""
    names = {p: name for name, p in model.named_parameters()}
    found: dict[str, Any] = {f"model {name}": value.clone() for name, value in full_tensors(model)}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{key} of {names[parameter]}"] = copy.deepcopy(whole(value))
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
        found[f"group {number}"] = (settings, [names[p] for p in group["params"]])
    return found
