"""Refuses `clip_grad_norm_`, `zero_grad` and other reads of `.grad` in compiled code, which would find no gradient.

Compiled code reads gathered parameters, and Dynamo takes the `.grad` of such a result of an operator to be `None`. What
is left in the graph is a read that nothing uses. Forwards may have such reads, too: a parameter that is only asked for
its shape. So only reads count that no module's forward makes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.modules.forward import in_forward
from fsdp_compile.ops.unshard import UNSHARD

_LIBRARIES = (torch.__path__[0], str(Path(__file__).parents[1]))


def refuse_gradient_reads(gm: fx.GraphModule) -> None:
    """Refuses a Dynamo graph that reads parameters outside of forwards and computes nothing with them.

    Raises:
        UnsupportedModelError: With the user's line that reads the parameter.
    """
    if in_forward():  # of the outermost module, which Dynamo notes at no node
        return
    for node in gm.graph.nodes:
        is_unused_read = node.target in (torch.ops.fsdp.unshard, UNSHARD) and not node.users
        if is_unused_read and not node.meta.get("nn_module_stack"):
            lines = (node.meta.get("stack_trace") or "").splitlines()
            users = [s for s in lines if s.lstrip().startswith("File ") and not any(path in s for path in _LIBRARIES)]
            raise UnsupportedModelError(
                "compiled code outside of a forward goes through parameters and computes nothing with them, as "
                "clip_grad_norm_(), zero_grad() and reads of .grad do: it would find no gradients",
                where=users[-1].strip() if users else node.name,
                instead="compile the forward and the loss alone, and make these calls after backward() in code that "
                "is not compiled",
            )
