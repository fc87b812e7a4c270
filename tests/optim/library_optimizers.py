"""Optimizers as other libraries write them: they look at whole parameters, and have state of other shapes and forms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import optim


def with_gradients(optimizer: optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Each parameter that is to be updated, with its group and its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, optimizer.state[parameter]


class Lamb(optim.Optimizer):
    """Of another library: it looks at the norm of each parameter, and has state of other shapes; "mu" is torch's name
    of a number."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, state in with_gradients(self):
            state.setdefault("mu", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
            state["norms"] = (*state.get("norms", ()), float(parameter.norm()))
            parameter.add_(state["mu"], alpha=-group["lr"] * state["norms"][-1])


class Counting(optim.Optimizer):
    """Of another library: it counts its steps in its groups, as a tensor and as a number, or what it has trained."""

    def __init__(self, params: Iterable[Any], *, elements: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "count": torch.zeros(()), "elements": elements})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / (group["steps"] + group["count"].item()))
                    if group["elements"]:
                        group["count"] += parameter.numel()


class Shampoo(optim.Optimizer):
    """Multiplies a gradient with inverse roots of sums of its products, of other shapes than the parameter's."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, state in with_gradients(self):
            gradient = parameter.grad.reshape(len(parameter), -1)
            for side, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
                state[side] = state.get(side, torch.eye(len(product), dtype=product.dtype)) + product
            update = _inverse_root(state["left"]) @ gradient @ _inverse_root(state["right"])
            parameter.sub_(update.view_as(parameter), alpha=group["lr"])


class Soap(Shampoo):
    """Adam in the eigenvectors of those sums, which it has from its second step on: state whose form changes."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, state in with_gradients(self):
            gradient = parameter.grad.reshape(len(parameter), -1)
            if "basis" in state:
                left, right = state["basis"]
                turned = left.T @ gradient @ right
                state.setdefault("square", torch.zeros_like(parameter)).view_as(turned).lerp_(turned**2, 0.1)
                update = left @ (turned / (state["square"].view_as(turned).sqrt() + 1e-8)) @ right.T
                parameter.sub_(update.view_as(parameter), alpha=group["lr"])
            state["basis"] = tuple(torch.linalg.qr(g @ g.T).Q.contiguous() for g in (gradient, gradient.T))
            state["steps"] = state.get("steps", 0) + 1


class Momentum(optim.Optimizer):
    """Its momentum has the name of a number in torch's ASGD."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, state in with_gradients(self):
            mean = state.setdefault("mu", torch.zeros_like(parameter))
            parameter.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=group["lr"])


class Listing(Counting):
    """Counts its steps in a list of its group."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("history", []).append(1)
        for group, parameter, _ in with_gradients(self):
            parameter.sub_(parameter.grad, alpha=group["lr"] / len(group["history"]))


class Mixed(Lamb):
    """Looks at norms in one group, and adds gradients in the other."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["plain"]]
        for group, parameter, state in with_gradients(self):
            seen = state.setdefault("sum", torch.zeros_like(parameter))
            parameter.sub_(seen.add_(parameter.grad), alpha=group["lr"])
        self.param_groups = [group for group in groups if not group["plain"]]
        super().step()
        self.param_groups = groups


def _inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T
