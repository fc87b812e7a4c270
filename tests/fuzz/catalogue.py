"""Awkward programs, one a row: what each does that few programs do.

What comes of each is written in `docs/limits.md` and nowhere else; `python -m tests.fuzz --catalogue`
measures all of them and writes that page.
"""

from __future__ import annotations

from typing import Final

from tests.fuzz.row import (
    BLOCK,
    CALL,
    FUNCTION,
    LINEAR,
    LSTM,
    METHOD,
    MODULE,
    NORMALIZED,
    RECURRENT,
    STATISTICS,
    UNCOMPILED,
    WEIGHT,
    Row,
)
from tests.fuzz.trainings import TRAININGS

ROWS: Final = (
    # What Dynamo leaves to Python.
    Row("an `nn.LSTM` in a compiled module", LSTM, RECURRENT),
    Row("an `nn.LSTM` in `model.compile()`", LSTM, RECURRENT, compiled=METHOD),
    Row("an `nn.LSTM` in a compiled function", LSTM, RECURRENT, compiled=FUNCTION),
    Row("an `nn.LSTM`, sharded before", LSTM, RECURRENT, shard="fully_shard(model)"),
    Row(
        "a graph break in a loop",
        forward="for _ in range(2):\n    torch._dynamo.graph_break()\n    x = self.m(x)\n" + CALL,
    ),
    Row(
        "blocks of a plain model compiled one by one",
        "self.m = Block()\nself.n = Block()",
        "return self.head(self.n(self.m(x)))",
        before=BLOCK,
        compiled="for block in (model.m, model.n):\n    block.compile(**BACKEND)\n"
        "return lambda x, ids: loss(model(x, ids))",
    ),
    Row(
        "all parts of a plain model compiled one by one, in place",
        "self.m = Block()\nself.n = Block()",
        "return self.head(self.n(self.m(x)))",
        before=BLOCK,
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
        compiled="with torch._dynamo.config.patch(recompile_limit=2):\n    for _ in range(3):\n"
        "        torch.compile(Model(), **BACKEND)(torch.ones(2, 6), None)\n" + MODULE,
    ),
    Row(
        "updated by hand",
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
        forward="values = {'weight': self.m.weight * 0.5, 'bias': self.m.bias + 1}\n"
        "return self.head(torch.func.functional_call(self.m, values, x))",
    ),
    Row(
        "`functional_call` with a step from a layer's own `named_parameters()`",
        forward="own = dict(self.m.named_parameters())\n"
        "loss = torch.func.functional_call(self.m, own, torch.ones(3, 6, dtype=x.dtype)).square().mean()\n"
        "gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)\n"
        "step = {name: p - 0.5 * gradient for (name, p), gradient in zip(own.items(), gradients)}\n"
        "return self.head(torch.func.functional_call(self.m, step, x))",
    ),
    Row("`self.m._parameters['weight']`", LINEAR, "return self.head(F.linear(x, self.m._parameters['weight']))"),
    Row(
        "a parameter in a closure",
        "weight = nn.Parameter(torch.randn(6, 6))\nself.w = weight\nself.function = lambda x: x @ weight",
        "return self.head(self.function(x))",
    ),
    Row(
        "`isinstance(self.w, nn.Parameter)`",
        WEIGHT,
        "return self.head(x @ self.w if isinstance(self.w, nn.Parameter) else x)",
    ),
    Row(
        "`type(self.w) is nn.Parameter`", WEIGHT, "return self.head(x @ self.w if type(self.w) is nn.Parameter else x)"
    ),
    Row(
        "`isinstance(w, nn.Parameter)` after a graph break",
        WEIGHT,
        "w = self.w\ntorch._dynamo.graph_break()\nreturn self.head(x @ w if isinstance(w, nn.Parameter) else x)",
        shard="fully_shard(model)",
    ),
    *Row(
        "`id()` of parameters",
        forward="places = {id(p): place for place, p in enumerate(self.parameters())}\n"
        "return self.head(self.m(x) * (1 + places.get(id(self.m.weight), 5)))",
    ).also_uncompiled(),
    Row(
        "a dict by parameters, not compiled",
        forward="places = {p: place for place, p in enumerate(self.parameters())}\n"
        "return self.head(self.m(x) * (1 + places[self.m.weight]))",
        shard="fully_shard(model)",
        compiled=UNCOMPILED,
    ),
    Row("a table by `type(self.m)`", forward="return self.head({nn.Linear: self.m}.get(type(self.m), lambda x: x)(x))"),
    Row("`type(self.m) is nn.Linear`", LINEAR, "return self.head(self.m(x) if type(self.m) is nn.Linear else x)"),
    *Row(
        "`self.a.weight is self.b.weight`, tied",
        "self.a = nn.Linear(6, 6)\nself.b = nn.Linear(6, 6)\nself.b.weight = self.a.weight",
        "return self.head(self.b(self.a(x)) if self.a.weight is self.b.weight else x)",
    ).also_uncompiled(),
    Row(
        "a base class with a required argument of `__init_subclass__`",
        "self.m = Sub()",
        CALL,
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
    Row("`linalg.inv` of a weight", WEIGHT, "return self.head(x @ torch.linalg.inv(self.w))"),
    Row("`linalg.solve` with a weight", WEIGHT, "return self.head(torch.linalg.solve(self.w, x.T).T)"),
    Row(
        "`linalg.cholesky` of a weight",
        WEIGHT,
        "eye = torch.eye(6, dtype=x.dtype)\nreturn self.head(x @ torch.linalg.cholesky(self.w @ self.w.T + eye))",
    ),
    Row("an orthogonal parametrization", "self.m = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))", CALL),
    # Writes in a forward.
    Row(
        "`torch._foreach_mul_` on a parameter in a forward",
        WEIGHT,
        "with torch.no_grad():\n    torch._foreach_mul_([self.w], 0.9)\nreturn self.head(x @ self.w)",
    ),
    Row(
        "`self.w.mul_` in a forward",
        WEIGHT,
        "with torch.no_grad():\n    self.w.mul_(0.9)\nreturn self.head(x @ self.w)",
    ),
    Row(
        "`aten.mul_` on a parameter in a forward",
        WEIGHT,
        "with torch.no_grad():\n    torch.ops.aten.mul_.Scalar(self.w, 0.9)\nreturn self.head(x @ self.w)",
    ),
    Row(
        "`out=` a parameter in a forward",
        WEIGHT,
        "with torch.no_grad():\n    torch.mul(self.w, 0.9, out=self.w)\nreturn self.head(x @ self.w)",
    ),
    *Row(
        "`self.w.data = ...` in a forward", WEIGHT, "self.w.data = self.w.data * 0.9\nreturn self.head(x @ self.w)"
    ).also_uncompiled(),
    *Row("running statistics that are parameters", STATISTICS, NORMALIZED).also_uncompiled(),
    *TRAININGS,
)
