"""A fuzzed case: a model and the script that trains it, as a short list of choices and as program text."""

from __future__ import annotations

import dataclasses
import textwrap
from enum import StrEnum
from typing import Literal

from tests.fuzz.pieces import PIECES

WIDTH = 6


class Place(StrEnum):
    """Where a piece is, and how it is called."""

    BLOCK = "block"
    """In a module of its own."""
    INLINE = "inline"
    """In the model itself."""
    RESIDUAL = "residual"
    LIST = "list"
    """Two modules of the same class in a `ModuleList`."""
    SHARED = "shared"
    """One module, called twice."""
    CHECKPOINTED = "checkpointed"
    FROZEN = "frozen"
    TRAINING_ONLY = "training only"
    AFTER_BREAK = "after a graph break"


class Form(StrEnum):
    """What is compiled."""

    MODULE = "torch.compile(model)"
    METHOD = "model.compile()"
    FUNCTION = "a function of the model"
    LOSS = "a function with the loss"
    NOTHING = "nothing"


class Shard(StrEnum):
    """What is sharded before the first call."""

    NOTHING = "nothing"
    MODEL = "model"
    BLOCKS = "blocks, then model"
    FIRST = "first block, then model"


class Output(StrEnum):
    """What the model returns."""

    TENSOR = "tensor"
    TUPLE = "tuple"
    NESTED = "nested"


class Accumulation(StrEnum):
    """How the microbatches before the last one of a step are accumulated."""

    NONE = "one microbatch"
    EACH = "reduced each"
    NO_SYNC = "no_sync"
    SET_SYNC = "set_requires_gradient_sync"
    KEPT = "reduced each, unsharded until the last one"


class Loss(StrEnum):
    """How a loss is made of forwards."""

    ONE = "one forward"
    SUM = "the sum of two forwards"
    TWO = "two forwards, then two backwards"


class Touch(StrEnum):
    """What is done to the sharded model between two steps."""

    NOTHING = "nothing"
    FULL = "full_params, and values changed there"
    UNSHARD = "unshard() before the forward"
    RESHARD = "unshard() and reshard()"


class Reload(StrEnum):
    """What is saved after the first step and loaded after the second one."""

    NOTHING = "nothing"
    MODEL = "model"
    BOTH = "model and optimizer"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A piece, by its name in `PIECES`, at its place."""

    piece: str
    place: Place = Place.BLOCK


@dataclasses.dataclass(frozen=True)
class Script:
    """How the model is sharded, compiled and trained; each default is the simplest value."""

    form: Form = Form.MODULE
    shard: Shard = Shard.NOTHING
    reshard: bool = True
    prefetch: int | str = 1
    bucket_mb: float | str = 0
    reduce_layout: Literal["aligned", "fsdp2"] = "aligned"
    half: bool = False
    """Forward and backward in bfloat16, gradients reduced in float32."""
    dynamic: bool | None = None
    output: Output = Output.TENSOR
    loss: Loss = Loss.ONE
    steps: int = 2
    accumulation: Accumulation = Accumulation.NONE
    optimizer: Literal["sgd", "momentum", "adamw", "foreach adamw"] = "sgd"
    clip: bool = False
    zeros: bool = False
    freezes: bool = False
    evaluates: bool = False
    sizes: Literal["same", "by step", "by rank"] = "same"
    reload: Reload = Reload.NOTHING
    touch: Touch = Touch.NOTHING
    flat_step: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn and shrunk."""

    layers: tuple[Layer, ...]
    script: Script = Script()

    def text(self) -> str:
        """The whole program: `Model`, `loss`, `shard`, `compiled` and `train`."""
        before = dict.fromkeys(PIECES[layer.piece].before for layer in self.layers)
        if any(layer.place is Place.CHECKPOINTED for layer in self.layers):
            before["from torch.utils.checkpoint import checkpoint\n"] = None
        classes = [
            class_text(f"B{i}", *PIECES[layer.piece].lines(i), "return x")
            for i, layer in enumerate(self.layers)
            if layer.place is not Place.INLINE
        ]
        parts = [HEADER, *filter(None, before), *classes, _model(self), *_script(self)]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"


HEADER = """
import copy

import torch
import torch.nn.functional as F
from torch import nn
"""

_OUTPUTS = {
    Output.TENSOR: ("self.head(x.tanh())", "out.square().mean()"),
    Output.TUPLE: ("self.head(x.tanh()), x.tanh()", "out[0].square().mean() + out[1].mean()"),
    Output.NESTED: (
        "{'out': self.head(x.tanh()), 'more': [x, None, (x.tanh().sum(1), 3)]}",
        "out['out'].square().mean() + 0.1 * out['more'][2][0].square().mean()",
    ),
}
_HALF = """
from torch.distributed.fsdp import MixedPrecisionPolicy

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SLACK = 0.1  # what bfloat16 may differ by
""".strip("\n")
_TOUCHES = {
    Touch.NOTHING: "",
    Touch.FULL: "with side.full_params(model), torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)",
    # Not after the last step, behind which no forward takes them.
    Touch.UNSHARD: "if step == 0:\n    side.method(model, 'unshard')",
    Touch.RESHARD: "side.method(model, 'unshard')\nside.method(model, 'reshard')",
}
_CALLS = {
    Place.BLOCK: "x = self.b{i}(x, ids)",
    Place.RESIDUAL: "x = x + self.b{i}(x, ids)",
    Place.LIST: "for b in self.b{i}:\n    x = b(x, ids)",
    Place.SHARED: "x = self.b{i}(self.b{i}(x, ids).tanh(), ids)",
    Place.CHECKPOINTED: "x = checkpoint(self.b{i}, x, ids, use_reentrant=False)",
    Place.FROZEN: "x = self.b{i}(x, ids)",
    Place.TRAINING_ONLY: "if self.training:\n    x = self.b{i}(x, ids)",
    Place.AFTER_BREAK: "torch._dynamo.graph_break()\nx = self.b{i}(x, ids)",
}
_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)",
    "foreach adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=True)",
}


def class_text(name: str, init: str, forward: str, returns: str) -> str:
    """The text of a module class."""
    lines = [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        textwrap.indent(init, " " * 8),
        "",
        "    def forward(self, x, ids):",
        *filter(None, [textwrap.indent(forward, " " * 8)]),
        f"        {returns}",
    ]
    return "\n".join(lines)


def _model(case: Case) -> str:
    init, forward = [], []
    for i, layer in enumerate(case.layers):
        if layer.place is Place.INLINE:
            made, called = PIECES[layer.piece].lines(i)
            init.append(made)
            forward.append(called)
            continue
        made = f"nn.ModuleList(B{i}() for _ in range(2))" if layer.place is Place.LIST else f"B{i}()"
        init.append(f"self.b{i} = {made}" + ".requires_grad_(False)" * (layer.place is Place.FROZEN))
        forward.append(_CALLS[layer.place].format(i=i))
    init.append(f"self.head = nn.Linear({WIDTH}, 5)")
    returned = f"return {_OUTPUTS[case.script.output][0]}"
    return class_text("Model", "\n".join(init), "\n".join(forward), returned)


def _script(case: Case) -> list[str]:
    loss = f"def loss(out):\n    return {_OUTPUTS[case.script.output][1]}"
    policy = [_HALF] if case.script.half else []
    return [loss, *policy, _backend(case.script), _shard(case), _compiled(case.script), _train(case.script)]


def _backend(script: Script) -> str:
    options = {"lower": "'eager'", "prefetch": repr(script.prefetch), "bucket_mb": repr(script.bucket_mb)}
    if script.reduce_layout != "aligned":
        options["reduce_layout"] = repr(script.reduce_layout)
    if script.shard is Shard.NOTHING:
        options |= _sharding(script)
    text = ", ".join(f"'{name}': {value}" for name, value in options.items())
    dynamic = f", 'dynamic': {script.dynamic}" * (script.dynamic is not None)
    return f"BACKEND = {{'backend': 'fsdp', 'options': {{{text}}}{dynamic}}}"


def _sharding(script: Script) -> dict[str, str]:
    """Arguments of `fully_shard`, or options of the same names."""
    return {
        **({} if script.reshard else {"reshard_after_forward": "False"}),
        **({"mp_policy": "HALF"} if script.half else {}),
    }


def _shard(case: Case) -> str:
    lines = ["def shard(model, fully_shard):"]
    argument = "".join(f", {name}={value}" for name, value in _sharding(case.script).items())
    blocks = [i for i, layer in enumerate(case.layers) if layer.place is not Place.INLINE]
    chosen = {Shard.BLOCKS: blocks, Shard.FIRST: blocks[:1]}.get(case.script.shard, [])
    for i in chosen:
        if case.layers[i].place is Place.LIST:
            lines += [f"    for b in model.b{i}:", f"        fully_shard(b{argument})"]
        else:
            lines.append(f"    fully_shard(model.b{i}{argument})")
    lines.append("    pass" if case.script.shard is Shard.NOTHING else f"    fully_shard(model{argument})")
    return "\n".join(lines)


def _compiled(script: Script) -> str:
    body = {
        Form.MODULE: "module = torch.compile(model, **BACKEND)\nreturn lambda x, ids: loss(module(x, ids))",
        Form.METHOD: "model.compile(**BACKEND)\nreturn lambda x, ids: loss(model(x, ids))",
        Form.FUNCTION: "call = torch.compile(lambda x, ids: model(x, ids), **BACKEND)\n"
        "return lambda x, ids: loss(call(x, ids))",
        Form.LOSS: "return torch.compile(lambda x, ids: loss(model(x, ids)), **BACKEND)",
        Form.NOTHING: "return lambda x, ids: loss(model(x, ids))",
    }[script.form]
    return "def compiled(model):\n" + textwrap.indent(body, " " * 4)


def _micro_batch(script: Script) -> str:
    rows = {"same": "4", "by step": "4 + 2 * (step % 3)", "by rank": "4, uneven=True"}[script.sizes]
    body = {
        Loss.ONE: "side.backward(call(x, ids))",
        Loss.SUM: "side.backward(call(x, ids) + call(0.5 * x, ids))",
        Loss.TWO: "first, second = call(x, ids), call(0.5 * x, ids)\nside.backward(first)\nside.backward(second)",
    }[script.loss]
    return f"for x, ids in side.shares({rows}):\n" + textwrap.indent(body, " " * 4)


def _train(script: Script) -> str:
    batch = _micro_batch(script)
    body = [
        {
            Accumulation.NONE: "",
            Accumulation.EACH: batch,
            Accumulation.NO_SYNC: "with side.no_sync(model):\n" + textwrap.indent(batch, " " * 4),
            Accumulation.SET_SYNC: f"side.set_sync(model, False)\n{batch}\nside.set_sync(model, True)",
            Accumulation.KEPT: f"side.method(model, 'set_reshard_after_backward', False)\n{batch}\n"
            "side.method(model, 'set_reshard_after_backward', True)",
        }[script.accumulation],
        batch,
        "side.see_gradients(model)",
        "side.note('norm', nn.utils.clip_grad_norm_(model.parameters(), 0.1))" * script.clip,
        "optimizer.step()",
        f"optimizer.zero_grad({'set_to_none=False' * script.zeros})",
        "next(model.children()).requires_grad_(step % 2 == 1)" * script.freezes,
        _EVALUATE * script.evaluates,
        _RELOAD[script.reload],
        _TOUCHES[script.touch],
    ]
    lines = "\n".join(part for part in body if part)
    made = _OPTIMIZERS[script.optimizer]
    if script.flat_step:
        made = f"side.flat_step({made})"
    return (
        "def train(model, call, side):\n"
        f"    optimizer = {made}\n"
        f"    for step in range({script.steps}):\n" + textwrap.indent(lines, " " * 8)
    )


_EVALUATE = """
model.eval()
with torch.no_grad():
    for x, ids in side.shares(4):
        side.note_own('evaluation', call(x, ids))
model.train()
""".strip("\n")
_SAVE = """
if step == 0:
    saved = {k: p.detach().clone() for k, p in model.state_dict().items() if k in dict(model.named_parameters())}
""".strip("\n")
_LOAD = "if step == 1:\n    model.load_state_dict(saved, strict=False)"
_RELOAD = {
    Reload.NOTHING: "",
    Reload.MODEL: f"{_SAVE}\n{_LOAD}",
    Reload.BOTH: f"{_SAVE}\n    saved_optimizer = copy.deepcopy(optimizer.state_dict())\n"
    f"{_LOAD}\n    optimizer.load_state_dict(saved_optimizer)",
}
