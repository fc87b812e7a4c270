"""`as_complex`: the complex parameter that a forward reads, a view of the pairs of numbers that are gathered.

It is `torch.view_as_complex`, and graphs have that; an operator of its own is what Dynamo sees of it.
"""

from __future__ import annotations

import torch

from fsdp_compile._torch.tracing import is_tracing_python

_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIBRARY.define("as_complex(Tensor(a) pairs) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,))
_MADE = "_fsdp_as_complex"
"""Attribute of Dynamo's fake result of a read: its complex views, made with gradients and without."""


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """A view of `[..., 2]` real numbers as `[...]` complex ones."""
    if not is_tracing_python():
        return torch.view_as_complex(pairs)
    # As for reads of real parameters: all of one parameter are one object and an `nn.Parameter`.
    made: dict[bool, torch.Tensor] = pairs.__dict__.setdefault(_MADE, {})
    mode = torch.is_grad_enabled()
    if mode not in made:
        made[mode] = torch.view_as_complex(pairs)
        made[mode]._is_param = True
    return made[mode]


_LIBRARY.impl("as_complex", as_complex, "CompositeImplicitAutograd")
