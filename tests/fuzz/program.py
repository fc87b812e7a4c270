"""A fuzzed case: a model and the script that trains it, as a short list of choices and as program text.

A table has the text of each choice by its name; its first row is the simplest one.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Literal

from tests.fuzz.pieces import PIECES

WIDTH = 6
PLACES = {
    "block": "x = self.b{i}(x, ids)",
    "inline": "",  # in the model itself; all others are modules of their own
    "residual": "x = x + self.b{i}(x, ids)",
    "list": "for b in self.b{i}:\n    x = b(x, ids)",
    "shared": "x = self.b{i}(self.b{i}(x, ids).tanh(), ids)",
    "checkpointed": "x = checkpoint(self.b{i}, x, ids, use_reentrant=False)",
    "frozen": "x = self.b{i}(x, ids)",
    "training only": "if self.training:\n    x = self.b{i}(x, ids)",
    "after a graph break": "torch._dynamo.graph_break()\nx = self.b{i}(x, ids)",
}
"""Where a piece is, and how it is called; of a list, two modules of one class."""
FORMS = {
    "torch.compile(model)": "module = torch.compile(model, **BACKEND)\nreturn lambda x, ids: loss(module(x, ids))",
    "model.compile()": "model.compile(**BACKEND)\nreturn lambda x, ids: loss(model(x, ids))",
    "a function of the model": "call = torch.compile(lambda x, ids: model(x, ids), **BACKEND)\n"
    "return lambda x, ids: loss(call(x, ids))",
    "a function with the loss": "return torch.compile(lambda x, ids: loss(model(x, ids)), **BACKEND)",
    "nothing": "return lambda x, ids: loss(model(x, ids))",
}
"""What is compiled."""
SHARDS = ("nothing", "model", "blocks, then model", "first block, then model")
"""What is sharded before the first call."""
OUTPUTS = {
    "tensor": ("self.head(x.tanh())", "out.square().mean()"),
    "tuple": ("self.head(x.tanh()), x.tanh()", "out[0].square().mean() + out[1].mean()"),
    "nested": (
        "{'out': self.head(x.tanh()), 'more': [x, None, (x.tanh().sum(1), 3)]}",
        "out['out'].square().mean() + 0.1 * out['more'][2][0].square().mean()",
    ),
}
"""What the model returns, and the loss of that."""
LOSSES = {
    "one forward": "side.backward(call(x, ids))",
    "the sum of two forwards": "side.backward(call(x, ids) + call(0.5 * x, ids))",
    "two forwards, then two backwards": "first, second = call(x, ids), call(0.5 * x, ids)\n"
    "side.backward(first)\nside.backward(second)",
}
SIZES = {"same": "4", "by step": "4 + 2 * (step % 3)", "by rank": "4, uneven=True"}
"""Rows of a batch."""
ACCUMULATIONS = {
    "one microbatch": "",
    "reduced each": "{batch}",
    "no_sync": "with side.no_sync(model):\n{indented}",
    "set_requires_gradient_sync": "side.set_sync(model, False)\n{batch}\nside.set_sync(model, True)",
    "reduced each, unsharded until the last one": "side.method(model, 'set_reshard_after_backward', False)\n{batch}\n"
    "side.method(model, 'set_reshard_after_backward', True)",
}
"""How the microbatches before the last one of a step are accumulated."""
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)",
    "foreach adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=True)",
}
_SAVE = (
    "if step == 0:\n"
    "    saved = {k: p.detach().clone() for k, p in model.state_dict().items() if k in dict(model.named_parameters())}"
)
_LOAD = "if step == 1:\n    model.load_state_dict(saved, strict=False)"
RELOADS = {
    "nothing": "",
    "model": f"{_SAVE}\n{_LOAD}",
    "model and optimizer": f"{_SAVE}\n    saved_optimizer = copy.deepcopy(optimizer.state_dict())\n"
    f"{_LOAD}\n    optimizer.load_state_dict(saved_optimizer)",
}
"""What is saved after the first step and loaded after the second one."""
TOUCHES = {
    "nothing": "",
    "full": "with side.full_params(model), torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)",
    # Not after the last step, behind which no forward takes them.
    "unshard": "if step == 0:\n    side.method(model, 'unshard')",
    "unshard and reshard": "side.method(model, 'unshard')\nside.method(model, 'reshard')",
}
"""What is done to the sharded model between two steps."""
_EVALUATE = (
    "model.eval()\n"
    "with torch.no_grad():\n"
    "    for x, ids in side.shares(4):\n"
    "        side.note_own('evaluation', call(x, ids))\n"
    "model.train()"
)
_HALF = (
    "from torch.distributed.fsdp import MixedPrecisionPolicy\n\n"
    "HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
    "SLACK = 0.1  # what bfloat16 may differ by"
)
HEADER = "import copy\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A piece, by its name in `PIECES`, at its place."""

    piece: str
    place: str = "block"


@dataclasses.dataclass(frozen=True)
class Script:
    """How the model is sharded, compiled and trained; each default is the simplest value."""

    form: str = "torch.compile(model)"
    shard: str = "nothing"
    reshard: bool = True
    prefetch: int | str = 1
    bucket_mb: float | str = 0
    reduce_layout: Literal["aligned", "fsdp2"] = "aligned"
    half: bool = False
    """Forward and backward in bfloat16, gradients reduced in float32."""
    dynamic: bool | None = None
    output: str = "tensor"
    loss: str = "one forward"
    steps: int = 2
    accumulation: str = "one microbatch"
    optimizer: str = "sgd"
    clip: bool = False
    zeros: bool = False
    freezes: bool = False
    evaluates: bool = False
    sizes: str = "same"
    reload: str = "nothing"
    touch: str = "nothing"
    flat_step: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn and shrunk."""

    layers: tuple[Layer, ...]
    script: Script = Script()

    def text(self) -> str:
        """The whole program: `Model`, `loss`, `shard`, `compiled` and `train`."""
        before = dict.fromkeys(PIECES[layer.piece].before for layer in self.layers)
        if any(layer.place == "checkpointed" for layer in self.layers):
            before["from torch.utils.checkpoint import checkpoint\n"] = None
        classes = [
            class_text(f"B{i}", *PIECES[layer.piece].lines(i), "return x")
            for i, layer in enumerate(self.layers)
            if layer.place != "inline"
        ]
        script = [
            f"def loss(out):\n    return {OUTPUTS[self.script.output][1]}",
            *([_HALF] if self.script.half else []),
            _backend(self.script),
            _shard(self),
            "def compiled(model):\n" + _indented(FORMS[self.script.form]),
            _train(self.script),
        ]
        parts = [HEADER, *filter(None, before), *classes, _model(self), *script]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _indented(text: str) -> str:
    return textwrap.indent(text, " " * 4)


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
        made, called = PIECES[layer.piece].lines(i)
        if layer.place != "inline":
            module = f"nn.ModuleList(B{i}() for _ in range(2))" if layer.place == "list" else f"B{i}()"
            made = f"self.b{i} = {module}" + ".requires_grad_(False)" * (layer.place == "frozen")
            called = PLACES[layer.place].format(i=i)
        init.append(made)
        forward.append(called)
    init.append(f"self.head = nn.Linear({WIDTH}, 5)")
    returned = f"return {OUTPUTS[case.script.output][0]}"
    return class_text("Model", "\n".join(init), "\n".join(forward), returned)


def _sharding(script: Script) -> dict[str, str]:
    """Arguments of `fully_shard`, or options of the same names."""
    return {
        **({} if script.reshard else {"reshard_after_forward": "False"}),
        **({"mp_policy": "HALF"} if script.half else {}),
    }


def _backend(script: Script) -> str:
    options = {"lower": "'eager'", "prefetch": repr(script.prefetch), "bucket_mb": repr(script.bucket_mb)}
    if script.reduce_layout != "aligned":
        options["reduce_layout"] = repr(script.reduce_layout)
    if script.shard == "nothing":
        options |= _sharding(script)
    text = ", ".join(f"'{name}': {value}" for name, value in options.items())
    dynamic = f", 'dynamic': {script.dynamic}" * (script.dynamic is not None)
    return f"BACKEND = {{'backend': 'fsdp', 'options': {{{text}}}{dynamic}}}"


def _shard(case: Case) -> str:
    lines = ["def shard(model, fully_shard):"]
    argument = "".join(f", {name}={value}" for name, value in _sharding(case.script).items())
    blocks = [i for i, layer in enumerate(case.layers) if layer.place != "inline"]
    for i in {"blocks, then model": blocks, "first block, then model": blocks[:1]}.get(case.script.shard, []):
        if case.layers[i].place == "list":
            lines += [f"    for b in model.b{i}:", f"        fully_shard(b{argument})"]
        else:
            lines.append(f"    fully_shard(model.b{i}{argument})")
    lines.append("    pass" if case.script.shard == "nothing" else f"    fully_shard(model{argument})")
    return "\n".join(lines)


def _train(script: Script) -> str:
    batch = f"for x, ids in side.shares({SIZES[script.sizes]}):\n" + _indented(LOSSES[script.loss])
    body = [
        ACCUMULATIONS[script.accumulation].format(batch=batch, indented=_indented(batch)),
        batch,
        "side.see_gradients(model)",
        "side.note('norm', nn.utils.clip_grad_norm_(model.parameters(), 0.1))" * script.clip,
        "optimizer.step()",
        f"optimizer.zero_grad({'set_to_none=False' * script.zeros})",
        "next(model.children()).requires_grad_(step % 2 == 1)" * script.freezes,
        _EVALUATE * script.evaluates,
        RELOADS[script.reload],
        TOUCHES[script.touch],
    ]
    lines = "\n".join(part for part in body if part)
    made = OPTIMIZERS[script.optimizer]
    if script.flat_step:
        made = f"side.flat_step({made})"
    return (
        "def train(model, call, side):\n"
        f"    optimizer = {made}\n"
        f"    for step in range({script.steps}):\n" + textwrap.indent(lines, " " * 8)
    )
