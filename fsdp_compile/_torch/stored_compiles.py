"""AOTAutograd's cache of whole compiles: the form in which it stores our graphs, and what turns it on.

It was looked at in torch 2.13 alone; with other versions nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch._inductor import config as inductor_config

CAN_STORE: Final = torch.__version__.startswith("2.13.")
"""Whether compiles are stored with this torch."""
try:
    from torch._functorch._aot_autograd.aot_autograd_result import FxGraphCacheLoadable
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.output_code import OutputCode
except ImportError:  # in another version
    OutputCode = object  # type: ignore[assignment,misc]

STORE: Final = {
    "enable_autograd_cache": True,
    "bundled_autograd_cache": True,  # entries are made of what a compiler returns, and not of Inductor's keys alone
    "force_non_lazy_backward_lowering": True,  # else backward is compiled in a backward, where these are not set
}
"""Settings of functorch for a compile that is stored."""
DO_NOT_STORE: Final = {"enable_autograd_cache": False}
"""The same for one that is not."""
STORE_GRAPHS_ALONE: Final[dict[str, bool]] = {"bundled_autograd_cache": False} if CAN_STORE else {}
"""The same while Inductor compiles one graph: it stores that in its own cache."""
_KEY = "_fsdp_compile_key"


def settings_beside_key() -> tuple[object, ...]:
    """Settings that AOTAutograd's graphs depend on and its key does not have: which attention kernels are allowed."""
    cuda = torch.backends.cuda
    return (
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()),
        tuple(torch._C._get_sdp_priority_order()),
    )


def add_to_key(gm: Any, text: str) -> None:
    """Makes a text a part of the key under which AOTAutograd stores the compile of a Dynamo graph."""
    # The key is made of the module's attributes among other things.
    setattr(gm, _KEY, text)


class StoredGraph(OutputCode):  # type: ignore[misc,valid-type,unused-ignore]
    """A compiled graph with what runs around it.

    Args:
        code: What Inductor has compiled, or loaded from its cache.
        summary: What is stored beside it; `summary.step.around(code)` is the code with what runs around it.
    """

    def __init__(self, code: Any, summary: Any) -> None:
        self.code = code
        self.summary = summary
        self._boxed_call = True
        self._time_taken_ns = getattr(code, "_time_taken_ns", None) or 0
        self._run = summary.step.around(code)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Runs it."""
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Replaces the code by its key in Inductor's cache; torch calls this on a copy."""
        key = getattr(self.code, "_fx_graph_cache_key", None)
        if key is None:
            raise BypassAOTAutogradCache("Inductor has not stored the code")
        lines = self.code._fx_graph_cache_debug_lines or []
        self.code = FxGraphCacheLoadable((key, lines), self.code.guards_expr)
        del self._run

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002  torch's signature
        """Loads the code from Inductor's cache; torch calls this on what it has unpickled."""
        self.code = self.code.post_compile(self.code.load(example_inputs), graph_kwargs)
        self._run = self.summary.step.around(self.code)
        partitioner: Any = inductor_config.custom_partitioner_fn
        partitioner.take_loaded(self.summary)  # it receives the summary of each graph that was loaded

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Inductor's cache has the kernels."""
