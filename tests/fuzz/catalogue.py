"""Awkward programs, one a row: what each does that few programs do.

What comes of each is written in `docs/awkward_programs.md` and nowhere else; `python -m tests.fuzz --catalogue`
measures all of them and writes that page.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Final

from tests.fuzz.program import HEADER, class_text

_TRAIN: Final = """
optimizer = {optimizer}
for step in range(3):
    for x, ids in side.shares(4):
        {backward}
    side.see_gradients(model)
    {update}
    optimizer.zero_grad()
"""
_SGD: Final = "torch.optim.SGD(model.parameters(), lr=0.1)"
_ADAMW: Final = "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)"
_MODULE: Final = "module = torch.compile(model, **BACKEND)\nreturn lambda x, ids: loss(module(x, ids))"
_METHOD: Final = "model.compile(**BACKEND)\nreturn lambda x, ids: loss(model(x, ids))"
_NOTHING: Final = "return lambda x, ids: loss(model(x, ids))"
_FUNCTION: Final = "return torch.compile(lambda x, ids: loss(model(x, ids)), **BACKEND)"
_LINEAR: Final = "self.m = nn.Linear(6, 6)"
_BLOCK: Final = (
    "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.inner = nn.Linear(6, 6)\n\n    def forward(self, x):\n        return self.inner(x)"
)
_WEIGHT: Final = "self.w = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))"
_CALL: Final = "return self.head(self.m(x))"
_UNCOMPILED: Final = "return lambda x, ids: loss(model(x, ids))"


@dataclasses.dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        says: What it does, in a few words.
        init: Lines of the model's constructor; `self.head` is there.
        forward: Lines of `forward(self, x, ids)`.
        loss: Of what forward returns, `out`.
        before: Lines above the model.
        shard: Body of `shard(model, fully_shard)`.
        compiled: Body of `compiled(model)`.
        train: Body of `train(model, call, side)`.
        options: Of the backend, as text.
    """

    says: str
    init: str
    forward: str
    loss: str = "out.square().mean()"
    before: str = ""
    shard: str = "pass"
    compiled: str = _MODULE
    train: str = _TRAIN.format(optimizer=_SGD, backward="side.backward(call(x, ids))", update="optimizer.step()")
    options: str = "{'backend': 'fsdp', 'options': {'lower': 'eager'}}"

    def text(self) -> str:
        """The whole program."""
        init = f"{self.init}\nself.head = nn.Linear(6, 5)"
        parts = [
            HEADER,
            *filter(None, [self.before]),
            class_text("Model", init, *self.forward.rpartition("\n")[::2]),
            f"def loss(out):\n    return {self.loss}",
            f"BACKEND = {self.options}",
            _function("shard(model, fully_shard)", self.shard),
            _function("compiled(model)", self.compiled),
            _function("train(model, call, side)", self.train.strip()),
        ]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _function(signature: str, body: str) -> str:
    return f"def {signature}:\n" + textwrap.indent(body, " " * 4)


def _trained(
    backward: str = "side.backward(call(x, ids))", update: str = "optimizer.step()", optimizer: str = _SGD
) -> str:
    indented = textwrap.indent(backward, " " * 8).lstrip()
    return _TRAIN.format(optimizer=optimizer, backward=indented, update=textwrap.indent(update, " " * 4).lstrip())


def _noted(gradient: str) -> str:
    """A loop that trains, and notes a gradient by `x` beside it."""
    return _trained(f"x.requires_grad_()\nside.note_own('by x', {gradient})\nside.backward(call(x, ids))")


_LSTM: Final = "self.m = nn.LSTM(6, 6)"
_RECURRENT: Final = "return self.head(self.m(x.unsqueeze(1))[0].squeeze(1))"
_SEQUENTIAL: Final = "self.m = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))"

_STATISTICS: Final = (
    "self.v = nn.Parameter(torch.zeros(6), requires_grad=False)\n"
    "self.u = nn.Parameter(torch.ones(6), requires_grad=False)"
)
_NORMALIZED: Final = "return self.head(F.batch_norm(x, self.v, self.u, training=True) + self.v)"
_ACCUMULATED: Final = _trained("side.backward(call(x, ids))\nside.backward(call(x, ids))")

ROWS: Final = (
    # What Dynamo leaves to Python.
    Row("an `nn.LSTM` in a compiled module", _LSTM, _RECURRENT),
    Row("an `nn.LSTM` in `model.compile()`", _LSTM, _RECURRENT, compiled=_METHOD),
    Row("an `nn.LSTM` in a compiled function", _LSTM, _RECURRENT, compiled=_FUNCTION),
    Row("an `nn.LSTM`, sharded before", _LSTM, _RECURRENT, shard="fully_shard(model)"),
    Row(
        "a graph break in a loop",
        _LINEAR,
        "for _ in range(2):\n    torch._dynamo.graph_break()\n    x = self.m(x)\n" + _CALL,
    ),
    Row(
        "blocks of a plain model compiled one by one",
        "self.m = Block()\nself.n = Block()",
        "return self.head(self.n(self.m(x)))",
        before=_BLOCK,
        compiled="for block in (model.m, model.n):\n    block.compile(**BACKEND)\n"
        "return lambda x, ids: loss(model(x, ids))",
    ),
    Row(
        "all parts of a plain model compiled one by one, in place",
        "self.m = Block()\nself.n = Block()",
        "return self.head(self.n(self.m(x)))",
        before=_BLOCK,
        compiled="for part in model.children():\n    part.compile(**BACKEND)\n"
        "return lambda x, ids: loss(model(x, ids))",
    ),
    Row(
        "a module of torch's own, sharded, compiled in place and called alone",
        "self.m = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)",
        "return self.head(self.m(x.unsqueeze(1)).squeeze(1))",
        shard="fully_shard(model.m)\nfully_shard(model.head)",
        compiled="for part in (model.m, model.head):\n    part.compile(**BACKEND)\n"
        "return lambda x, ids: loss(model.head(model.m(x.unsqueeze(1)).squeeze(1)))",
    ),
    Row(
        "the fourth model of a class, with a recompile limit of two",
        _LINEAR,
        _CALL,
        compiled="with torch._dynamo.config.patch(recompile_limit=2):\n    for _ in range(3):\n"
        "        torch.compile(Model(), **BACKEND)(torch.ones(2, 6), None)\n" + _MODULE,
    ),
    Row(
        "updated by hand",
        _LINEAR,
        _CALL,
        train="for step in range(3):\n"
        "    for x, ids in side.shares(4):\n"
        "        side.backward(call(x, ids))\n"
        "    with torch.no_grad():\n"
        "        for p in model.parameters():\n"
        "            p -= 0.1 * p.grad\n"
        "            p.grad = None",
    ),
    # Parameters reached in other ways.
    Row(
        "`functional_call` with other values in a forward",
        _LINEAR,
        "values = {'weight': self.m.weight * 0.5, 'bias': self.m.bias + 1}\n"
        "return self.head(torch.func.functional_call(self.m, values, x))",
    ),
    Row(
        "`functional_call` with a step from a layer's own `named_parameters()`",
        _LINEAR,
        "own = dict(self.m.named_parameters())\n"
        "loss = torch.func.functional_call(self.m, own, torch.ones(3, 6, dtype=x.dtype)).square().mean()\n"
        "gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)\n"
        "step = {name: p - 0.5 * gradient for (name, p), gradient in zip(own.items(), gradients)}\n"
        "return self.head(torch.func.functional_call(self.m, step, x))",
    ),
    Row("`self.m._parameters['weight']`", _LINEAR, "return self.head(F.linear(x, self.m._parameters['weight']))"),
    Row(
        "a parameter in a closure",
        "weight = nn.Parameter(torch.randn(6, 6))\nself.w = weight\nself.function = lambda x: x @ weight",
        "return self.head(self.function(x))",
    ),
    Row(
        "`isinstance(self.w, nn.Parameter)`",
        _WEIGHT,
        "return self.head(x @ self.w if isinstance(self.w, nn.Parameter) else x)",
    ),
    Row(
        "`type(self.w) is nn.Parameter`", _WEIGHT, "return self.head(x @ self.w if type(self.w) is nn.Parameter else x)"
    ),
    Row(
        "`isinstance(w, nn.Parameter)` after a graph break",
        _WEIGHT,
        "w = self.w\ntorch._dynamo.graph_break()\nreturn self.head(x @ w if isinstance(w, nn.Parameter) else x)",
        shard="fully_shard(model)",
    ),
    Row(
        "`id()` of parameters",
        _LINEAR,
        "places = {id(p): place for place, p in enumerate(self.parameters())}\n"
        "return self.head(self.m(x) * (1 + places.get(id(self.m.weight), 5)))",
    ),
    Row(
        "`id()` of parameters, not compiled",
        _LINEAR,
        "places = {id(p): place for place, p in enumerate(self.parameters())}\n"
        "return self.head(self.m(x) * (1 + places.get(id(self.m.weight), 5)))",
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
    ),
    Row(
        "a dict by parameters, not compiled",
        _LINEAR,
        "places = {p: place for place, p in enumerate(self.parameters())}\n"
        "return self.head(self.m(x) * (1 + places[self.m.weight]))",
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
    ),
    Row(
        "a table by `type(self.m)`",
        _LINEAR,
        "return self.head({nn.Linear: self.m}.get(type(self.m), lambda x: x)(x))",
    ),
    Row("`type(self.m) is nn.Linear`", _LINEAR, "return self.head(self.m(x) if type(self.m) is nn.Linear else x)"),
    Row(
        "`self.a.weight is self.b.weight`, tied",
        "self.a = nn.Linear(6, 6)\nself.b = nn.Linear(6, 6)\nself.b.weight = self.a.weight",
        "return self.head(self.b(self.a(x)) if self.a.weight is self.b.weight else x)",
    ),
    Row(
        "`self.a.weight is self.b.weight`, tied, not compiled",
        "self.a = nn.Linear(6, 6)\nself.b = nn.Linear(6, 6)\nself.b.weight = self.a.weight",
        "return self.head(self.b(self.a(x)) if self.a.weight is self.b.weight else x)",
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
    ),
    Row(
        "a base class with a required argument of `__init_subclass__`",
        "self.m = Sub()",
        _CALL,
        before="class Base(nn.Module):\n    def __init_subclass__(cls, *, kind):\n        cls.kind = kind\n\n"
        "class Sub(Base, kind='a'):\n    def __init__(self):\n        super().__init__()\n"
        "        self.m = nn.Linear(6, 6)\n\n    def forward(self, x):\n        return self.m(x)",
    ),
    Row(
        "an attribute of a parameter",
        "self.w = nn.Parameter(torch.randn(6, 6))\nself.w.scale = 2.0",
        "return self.head(x @ self.w * self.w.scale)",
    ),
    # Kinds of parameters.
    Row("a parameter of 0 dimensions", "self.s = nn.Parameter(torch.tensor(0.5))", "return self.head(x * self.s)"),
    Row(
        "a parameter without elements", "self.s = nn.Parameter(torch.zeros(0, 6))", "return self.head(x + self.s.sum())"
    ),
    Row(
        "a complex parameter",
        "self.c = nn.Parameter(torch.view_as_complex(torch.randn(6, 2)))",
        "return self.head(x * self.c.to(torch.promote_types(self.c.dtype, torch.complex64)).abs().to(x.dtype))",
    ),
    Row(
        "parameters that share memory",
        "both = torch.randn(2, 6, 6)\nself.v = nn.Parameter(both[0])\nself.w = nn.Parameter(both[0])",
        "return self.head(x @ self.v + x @ self.w)",
    ),
    Row(
        "an embedding with `max_norm`",
        "self.e = nn.Embedding(7, 6, max_norm=1.0)",
        "return self.head(x + self.e(ids[:, 0]))",
    ),
    Row(
        "an embedding with `sparse=True`",
        "self.e = nn.Embedding(7, 6, sparse=True)",
        "return self.head(x + self.e(ids[:, 0]))",
    ),
    # Linear algebra of weights.
    Row("`linalg.inv` of a weight", _WEIGHT, "return self.head(x @ torch.linalg.inv(self.w))"),
    Row("`linalg.solve` with a weight", _WEIGHT, "return self.head(torch.linalg.solve(self.w, x.T).T)"),
    Row(
        "`linalg.cholesky` of a weight",
        _WEIGHT,
        "eye = torch.eye(6, dtype=x.dtype)\nreturn self.head(x @ torch.linalg.cholesky(self.w @ self.w.T + eye))",
    ),
    Row("an orthogonal parametrization", "self.m = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))", _CALL),
    # Writes in a forward.
    Row(
        "`torch._foreach_mul_` on a parameter in a forward",
        _WEIGHT,
        "with torch.no_grad():\n    torch._foreach_mul_([self.w], 0.9)\nreturn self.head(x @ self.w)",
    ),
    Row(
        "`self.w.mul_` in a forward",
        _WEIGHT,
        "with torch.no_grad():\n    self.w.mul_(0.9)\nreturn self.head(x @ self.w)",
    ),
    Row(
        "`aten.mul_` on a parameter in a forward",
        _WEIGHT,
        "with torch.no_grad():\n    torch.ops.aten.mul_.Scalar(self.w, 0.9)\nreturn self.head(x @ self.w)",
    ),
    Row(
        "`out=` a parameter in a forward",
        _WEIGHT,
        "with torch.no_grad():\n    torch.mul(self.w, 0.9, out=self.w)\nreturn self.head(x @ self.w)",
    ),
    Row("`self.w.data = ...` in a forward", _WEIGHT, "self.w.data = self.w.data * 0.9\nreturn self.head(x @ self.w)"),
    Row(
        "`self.w.data = ...` in a forward, not compiled",
        _WEIGHT,
        "self.w.data = self.w.data * 0.9\nreturn self.head(x @ self.w)",
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
    ),
    Row("running statistics that are parameters", _STATISTICS, _NORMALIZED),
    Row(
        "running statistics that are parameters, not compiled",
        _STATISTICS,
        _NORMALIZED,
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
    ),
    # What autograd is asked for.
    Row(
        "`self.w.grad is None` in a forward that accumulates",
        _WEIGHT,
        "return self.head(x @ self.w if self.w.grad is None else x)",
        train=_ACCUMULATED,
    ),
    Row(
        "`p.grad` of all parameters in a forward that accumulates, after a graph break",
        _WEIGHT,
        "torch._dynamo.graph_break()\nfresh = all(p.grad is None for p in self.parameters())\n"
        "return self.head(x @ self.w if fresh else x)",
        train=_ACCUMULATED,
    ),
    Row(
        "`self.w.grad is None` in a forward that accumulates, not compiled",
        _WEIGHT,
        "return self.head(x @ self.w if self.w.grad is None else x)",
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
        train=_ACCUMULATED,
    ),
    Row(
        "a head whose output is unused, AdamW",
        "self.m = nn.Linear(6, 6)\nself.n = nn.Linear(6, 6)",
        "return self.head(self.m(x)), self.n(x)",
        "out[0].square().mean()",
        train=_trained(optimizer=_ADAMW),
    ),
    Row(
        "a head whose output is unused, AdamW, not compiled",
        "self.m = nn.Linear(6, 6)\nself.n = nn.Linear(6, 6)",
        "return self.head(self.m(x)), self.n(x)",
        "out[0].square().mean()",
        shard="fully_shard(model)",
        compiled=_NOTHING,
        train=_trained(optimizer=_ADAMW),
    ),
    Row(
        "`loss.backward(inputs=...)`",
        _LINEAR,
        _CALL,
        train=_trained("side.backward(call(x, ids), inputs=list(model.m.parameters()))"),
    ),
    Row(
        "`loss.backward(inputs=...)` of a layer that is sharded by itself",
        _LINEAR,
        _CALL,
        shard="fully_shard(model.m)\nfully_shard(model)",
        train=_trained("side.backward(call(x, ids), inputs=list(model.m.parameters()))"),
    ),
    Row(
        "`loss.backward(inputs=...)` of what the model is called with",
        _LINEAR,
        _CALL,
        train=_trained(
            "x.requires_grad_()\nside.backward(call(x, ids), inputs=[x])\n"
            "side.note_own('gradient of x', x.grad / side.scaled(torch.ones(())))\nside.backward(call(x, ids))"
        ),
    ),
    Row(
        "`autograd.grad(loss, parameters)`",
        _LINEAR,
        _CALL,
        train=_trained(
            "grads = torch.autograd.grad(side.scaled(call(x, ids)), list(model.parameters()))\n"
            "for p, g in zip(model.parameters(), grads):\n"
            "    p.grad = g if p.grad is None else p.grad + g"
        ),
    ),
    Row(
        "`torch.func.grad` in a forward",
        _WEIGHT,
        "g = torch.func.grad(lambda y: (y @ self.w).square().sum())(x)\nreturn self.head(x + 0.1 * g)",
    ),
    Row("`torch.func.jacrev` of the loss", _LINEAR, _CALL, train=_noted("torch.func.jacrev(call)(x, ids)")),
    Row(
        "`torch.func.jacrev` of the loss, sharded before",
        _LINEAR,
        _CALL,
        shard="fully_shard(model)",
        train=_noted("torch.func.jacrev(call)(x, ids)"),
    ),
    Row(
        "`torch.func.vjp` of the loss",
        _LINEAR,
        _CALL,
        train=_noted("torch.func.vjp(lambda x: call(x, ids), x)[1](torch.ones((), dtype=x.dtype))[0]"),
    ),
    Row(
        "`autograd.functional.jacobian` of the loss",
        _LINEAR,
        _CALL,
        train=_noted("torch.autograd.functional.jacobian(lambda x: call(x, ids), x)"),
    ),
    Row(
        "`autograd.grad(..., is_grads_batched=True)`",
        _LINEAR,
        _CALL,
        train=_noted("torch.autograd.grad(call(x, ids), x, torch.eye(3, dtype=x.dtype)[0], is_grads_batched=True)[0]"),
    ),
    Row(
        "`autograd.functional.hvp` of the loss (double backward)",
        _LINEAR,
        _CALL,
        train=_noted("torch.autograd.functional.hvp(lambda x: call(x, ids), x, torch.ones_like(x))[1]"),
    ),
    Row(
        "reentrant checkpointing whose input needs no gradient",
        _LINEAR,
        "return self.head(x + checkpoint(self.m, x, use_reentrant=True))",
        before="from torch.utils.checkpoint import checkpoint",
    ),
    Row(
        "reentrant checkpointing whose input needs no gradient, not compiled",
        _LINEAR,
        "return self.head(x + checkpoint(self.m, x, use_reentrant=True))",
        before="from torch.utils.checkpoint import checkpoint",
        shard="fully_shard(model)",
        compiled=_NOTHING,
    ),
    Row(
        "a layer with and without gradients in one forward, under `no_sync`",
        _LINEAR,
        "with torch.no_grad():\n    y = self.m(x)\nreturn self.head(self.m(x) + y)",
        train=_trained("with side.no_sync(model):\n    side.backward(call(x, ids))\nside.backward(call(x, ids))"),
    ),
    Row(
        "a checkpointed batch norm: compiled, its statistics are updated once",
        "self.m = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))",
        "return self.head(checkpoint(self.m, x, use_reentrant=False))",
        before="from torch.utils.checkpoint import checkpoint",
    ),
    Row(
        "a checkpointed batch norm, not compiled",
        "self.m = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))",
        "return self.head(checkpoint(self.m, x, use_reentrant=False))",
        before="from torch.utils.checkpoint import checkpoint",
        shard="fully_shard(model)",
        compiled=_NOTHING,
    ),
    Row(
        "a plain model with `mp_policy` among the options, and float inputs",
        _LINEAR,
        _CALL,
        before="from torch.distributed.fsdp import MixedPrecisionPolicy\n\nSLACK = 0.1",
        options="{'backend': 'fsdp', 'options': {'lower': 'eager', "
        "'mp_policy': MixedPrecisionPolicy(torch.bfloat16, torch.float32)}}",
    ),
    # Control flow.
    Row(
        "`torch.cond`, and a layer",
        _LINEAR,
        "x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))\n" + _CALL,
    ),
    Row(
        "`torch.cond` between two layers",
        "self.m = nn.Linear(6, 6)\nself.n = nn.Linear(6, 6)",
        "x = torch.cond(x.sum() > 0, lambda x: self.m(x), lambda x: self.n(x), (x,))\nreturn self.head(x)",
    ),
    Row(
        "`torch.cond` between two layers, not compiled",
        "self.m = nn.Linear(6, 6)\nself.n = nn.Linear(6, 6)",
        "x = torch.cond(x.sum() > 0, lambda x: self.m(x), lambda x: self.n(x), (x,))\nreturn self.head(x)",
        shard="fully_shard(model)",
        compiled=_NOTHING,
    ),
    Row(
        "`nested_compile_region`",
        _LINEAR,
        "return self.head(region(self.m, x))",
        before="@torch.compiler.nested_compile_region\ndef region(module, x):\n    return module(x)",
    ),
    Row(
        "rows chosen by data",
        _LINEAR,
        "chosen = x[ids[:, 0] > 2]\nreturn torch.cat([self.head(self.m(chosen)), self.head(x)])",
        "out.square().sum() / 20",
    ),
    Row(
        "`dynamic=True` with `no_sync`",
        _LINEAR,
        _CALL,
        train=_trained("with side.no_sync(model):\n    side.backward(call(x, ids))\nside.backward(call(x, ids))"),
        options="{'backend': 'fsdp', 'options': {'lower': 'eager'}, 'dynamic': True}",
    ),
    Row(
        "`dynamic=True`, a size from an int of a closure",
        "self.m = nn.Linear(6, 6)\nn = 3\nself.function = lambda x: x.reshape(n, -1).sum(0).reshape(-1, 1)",
        "return self.head(self.m(x) + self.function(x.repeat_interleave(3, 0)).mean())",
        options="{'backend': 'fsdp', 'options': {'lower': 'eager'}, 'dynamic': True}",
    ),
    # What is done to a model between steps.
    Row(
        "a layer of an `nn.Sequential` thawed after the first step",
        _SEQUENTIAL + "\nself.m[0].requires_grad_(False)",
        _CALL,
        train=_trained(update="optimizer.step()\nmodel.m[0].requires_grad_(True)"),
    ),
    Row(
        "the `nn.Sequential` itself compiled, a layer thawed after the first step",
        _SEQUENTIAL + "\nself.m[0].requires_grad_(False)",
        _CALL,
        compiled="module = torch.compile(model.m, **BACKEND)\nreturn lambda x, ids: loss(model.head(module(x)))",
        shard="fully_shard(model)",
        train=_trained(update="optimizer.step()\nmodel.m[0].requires_grad_(True)"),
    ),
    Row(
        "a weight replaced after the first step",
        _LINEAR,
        _CALL,
        train=_trained(
            update="optimizer.step()\nif step == 0:\n"
            "    model.m.weight = nn.Parameter(torch.eye(6, dtype=side.dtype))\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        ),
    ),
    Row(
        "a parametrization removed after the first step",
        "self.m = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))",
        _CALL,
        train=_trained(
            update="optimizer.step()\nif step == 0:\n"
            "    nn.utils.parametrize.remove_parametrizations(model.m, 'weight')\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        ),
    ),
    Row(
        "a parametrization added after the first step",
        _LINEAR,
        _CALL,
        train=_trained(
            update="optimizer.step()\nif step == 0:\n"
            "    nn.utils.parametrizations.weight_norm(model.m)\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        ),
    ),
    Row(
        "`copy.deepcopy` after training",
        _LINEAR,
        _CALL,
        train=_trained()
        + "twin = copy.deepcopy(model)\nfor name, p in twin.named_parameters():\n    side.note(name, p)",
    ),
    Row(
        "an `AveragedModel` of the sharded model",
        _LINEAR,
        _CALL,
        shard="fully_shard(model)",
        train="averaged = torch.optim.swa_utils.AveragedModel(model)\n"
        + _trained(update="optimizer.step()\naveraged.update_parameters(model)").strip()
        + "\nfor name, p in averaged.module.named_parameters():\n    side.note(name, p)",
    ),
    # What scripts do by hand with parameters and gradients.
    Row(
        "a forward assigned to the sharded model, which takes its head's weight, not compiled",
        _LINEAR,
        _CALL,
        shard="fully_shard(model)",
        compiled=_UNCOMPILED,
        train="def assigned(self, x, ids):\n"
        "    w = self.head.weight\n"
        "    w = w.full_tensor() if hasattr(w, 'full_tensor') else w\n"
        "    return F.linear(self.m(x), w, self.head.bias)\n"
        "model.forward = assigned.__get__(model)\n" + _trained().strip(),
    ),
    Row(
        "full values loaded by `load_state_dict` after the first step",
        _LINEAR,
        _CALL,
        train=_trained(
            update="optimizer.step()\nif step == 0:\n"
            "    model.load_state_dict({k: torch.ones(v.shape, dtype=v.dtype) for k, v in model.state_dict().items()})"
        ),
    ),
    Row(
        "`weight[i].zero_()` between steps",
        _LINEAR,
        _CALL,
        train=_trained(update="optimizer.step()\nwith torch.no_grad():\n    model.m.weight[5].zero_()"),
    ),
    Row(
        "the largest gradient by `p.grad.abs().max().item()`",
        _LINEAR,
        _CALL,
        train=_trained(
            update="side.note('max', torch.tensor(max(p.grad.abs().max().item() for p in model.parameters())))\n"
            "optimizer.step()"
        ),
    ),
    # Steps.
    Row(
        "a compiled step that clips",
        _LINEAR,
        _CALL,
        compiled="def step(x, ids):\n    return loss(model(x, ids))\nreturn torch.compile(step, **BACKEND)",
        train=_trained(
            update="clip = torch.compile(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1), **BACKEND)\n"
            "side.note('norm', clip())\noptimizer.step()"
        ),
    ),
    Row(
        "LBFGS",
        _LINEAR,
        _CALL,
        train="optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)\n"
        "for step in range(2):\n"
        "    batch = list(side.shares(4))\n"
        "    def closure():\n"
        "        optimizer.zero_grad()\n"
        "        losses = [side.scaled(call(x, ids)) for x, ids in batch]\n"
        "        total = sum(losses)\n"
        "        total.backward()\n"
        "        return total.detach()\n"
        "    optimizer.step(closure)",
    ),
    Row(
        "two plain models that share a trunk, compiled each",
        "self.m = nn.Linear(6, 6)\nself.a = Head(self.m)\nself.b = Head(self.m)",
        "return self.head(self.a(x) + self.b(x))",
        before="class Head(nn.Module):\n    def __init__(self, trunk):\n        super().__init__()\n"
        "        self.trunk = trunk\n        self.own = nn.Linear(6, 6)\n\n"
        "    def forward(self, x):\n        return self.own(self.trunk(x))",
        compiled="for part in (model.a, model.b, model.head):\n    part.compile(**BACKEND)\n"
        "return lambda x, ids: loss(model(x, ids))",
    ),
    Row(
        "a multi-gradient hook",
        _LINEAR,
        _CALL,
        train="seen = []\n"
        "handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda g: seen.append(1))\n"
        + _trained().strip()
        + "\nside.note('hooks ran', torch.tensor(float(len(seen) > 0)))",
    ),
)
