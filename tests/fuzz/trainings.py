"""Awkward programs by what they ask of autograd, do between steps, and do by hand with parameters and gradients."""

from __future__ import annotations

from typing import Final

from tests.fuzz.row import ACCUMULATED, ADAMW, CALL, LINEAR, SEQUENTIAL, UNCOMPILED, WEIGHT, Row, noted, trained

TRAININGS: Final = (
    # What autograd is asked for.
    *Row(
        "`self.w.grad is None` in a forward that accumulates",
        WEIGHT,
        "return self.head(x @ self.w if self.w.grad is None else x)",
        train=ACCUMULATED,
    ).also_uncompiled(),
    Row(
        "`p.grad` of all parameters in a forward that accumulates, after a graph break",
        WEIGHT,
        "torch._dynamo.graph_break()\nfresh = all(p.grad is None for p in self.parameters())\n"
        "return self.head(x @ self.w if fresh else x)",
        train=ACCUMULATED,
    ),
    *Row(
        "a head whose output is unused, AdamW",
        "self.m = nn.Linear(6, 6)\nself.n = nn.Linear(6, 6)",
        "return self.head(self.m(x)), self.n(x)",
        "out[0].square().mean()",
        train=trained(optimizer=ADAMW),
    ).also_uncompiled(),
    Row("`loss.backward(inputs=...)`", train=trained("side.backward(call(x, ids), inputs=list(model.m.parameters()))")),
    Row(
        "`loss.backward(inputs=...)` of a layer that is sharded by itself",
        shard="fully_shard(model.m)\nfully_shard(model)",
        train=trained("side.backward(call(x, ids), inputs=list(model.m.parameters()))"),
    ),
    Row(
        "`loss.backward(inputs=...)` of what the model is called with",
        train=trained(
            "x.requires_grad_()\nside.backward(call(x, ids), inputs=[x])\n"
            "side.note_own('gradient of x', x.grad / side.scaled(torch.ones(())))\nside.backward(call(x, ids))"
        ),
    ),
    Row(
        "`autograd.grad(loss, parameters)`",
        train=trained(
            "grads = torch.autograd.grad(side.scaled(call(x, ids)), list(model.parameters()))\n"
            "for p, g in zip(model.parameters(), grads):\n"
            "    p.grad = g if p.grad is None else p.grad + g"
        ),
    ),
    Row(
        "`torch.func.grad` in a forward",
        WEIGHT,
        "g = torch.func.grad(lambda y: (y @ self.w).square().sum())(x)\nreturn self.head(x + 0.1 * g)",
    ),
    Row("`torch.func.jacrev` of the loss", LINEAR, CALL, train=noted("torch.func.jacrev(call)(x, ids)")),
    Row(
        "`torch.func.jacrev` of the loss, sharded before",
        shard="fully_shard(model)",
        train=noted("torch.func.jacrev(call)(x, ids)"),
    ),
    Row(
        "`torch.func.vjp` of the loss",
        train=noted("torch.func.vjp(lambda x: call(x, ids), x)[1](torch.ones((), dtype=x.dtype))[0]"),
    ),
    Row(
        "`autograd.functional.jacobian` of the loss",
        train=noted("torch.autograd.functional.jacobian(lambda x: call(x, ids), x)"),
    ),
    Row(
        "`autograd.grad(..., is_grads_batched=True)`",
        train=noted("torch.autograd.grad(call(x, ids), x, torch.eye(3, dtype=x.dtype)[0], is_grads_batched=True)[0]"),
    ),
    Row(
        "`autograd.functional.hvp` of the loss (double backward)",
        train=noted("torch.autograd.functional.hvp(lambda x: call(x, ids), x, torch.ones_like(x))[1]"),
    ),
    *Row(
        "reentrant checkpointing whose input needs no gradient",
        forward="return self.head(x + checkpoint(self.m, x, use_reentrant=True))",
        before="from torch.utils.checkpoint import checkpoint",
    ).also_uncompiled(),
    Row(
        "a layer with and without gradients in one forward, under `no_sync`",
        forward="with torch.no_grad():\n    y = self.m(x)\nreturn self.head(self.m(x) + y)",
        train=trained("with side.no_sync(model):\n    side.backward(call(x, ids))\nside.backward(call(x, ids))"),
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
        compiled=UNCOMPILED,
    ),
    Row(
        "a plain model with `mp_policy` among the options, and float inputs",
        before="from torch.distributed.fsdp import MixedPrecisionPolicy\n\nSLACK = 0.1",
        options="{'backend': 'fsdp', 'options': {'lower': 'eager', "
        "'mp_policy': MixedPrecisionPolicy(torch.bfloat16, torch.float32)}}",
    ),
    # Control flow.
    Row(
        "`torch.cond`, and a layer",
        forward="x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))\n" + CALL,
    ),
    *Row(
        "`torch.cond` between two layers",
        "self.m = nn.Linear(6, 6)\nself.n = nn.Linear(6, 6)",
        "x = torch.cond(x.sum() > 0, lambda x: self.m(x), lambda x: self.n(x), (x,))\nreturn self.head(x)",
    ).also_uncompiled(),
    Row(
        "`nested_compile_region`",
        forward="return self.head(region(self.m, x))",
        before="@torch.compiler.nested_compile_region\ndef region(module, x):\n    return module(x)",
    ),
    Row(
        "rows chosen by data",
        forward="chosen = x[ids[:, 0] > 2]\nreturn torch.cat([self.head(self.m(chosen)), self.head(x)])",
        loss="out.square().sum() / 20",
    ),
    Row(
        "`dynamic=True` with `no_sync`",
        train=trained("with side.no_sync(model):\n    side.backward(call(x, ids))\nside.backward(call(x, ids))"),
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
        SEQUENTIAL + "\nself.m[0].requires_grad_(False)",
        CALL,
        train=trained(update="optimizer.step()\nmodel.m[0].requires_grad_(True)"),
    ),
    Row(
        "the `nn.Sequential` itself compiled, a layer thawed after the first step",
        SEQUENTIAL + "\nself.m[0].requires_grad_(False)",
        CALL,
        compiled="module = torch.compile(model.m, **BACKEND)\nreturn lambda x, ids: loss(model.head(module(x)))",
        shard="fully_shard(model)",
        train=trained(update="optimizer.step()\nmodel.m[0].requires_grad_(True)"),
    ),
    Row(
        "a weight replaced after the first step",
        train=trained(
            update="optimizer.step()\nif step == 0:\n"
            "    model.m.weight = nn.Parameter(torch.eye(6, dtype=side.dtype))\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        ),
    ),
    Row(
        "a parametrization removed after the first step",
        "self.m = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))",
        CALL,
        train=trained(
            update="optimizer.step()\nif step == 0:\n"
            "    nn.utils.parametrize.remove_parametrizations(model.m, 'weight')\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        ),
    ),
    Row(
        "a parametrization added after the first step",
        train=trained(
            update="optimizer.step()\nif step == 0:\n"
            "    nn.utils.parametrizations.weight_norm(model.m)\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        ),
    ),
    Row(
        "`copy.deepcopy` after training",
        train=trained()
        + "twin = copy.deepcopy(model)\nfor name, p in twin.named_parameters():\n    side.note(name, p)",
    ),
    Row(
        "an `AveragedModel` of the sharded model",
        shard="fully_shard(model)",
        train="averaged = torch.optim.swa_utils.AveragedModel(model)\n"
        + trained(update="optimizer.step()\naveraged.update_parameters(model)").strip()
        + "\nfor name, p in averaged.module.named_parameters():\n    side.note(name, p)",
    ),
    # What scripts do by hand with parameters and gradients.
    Row(
        "a forward assigned to the sharded model, which takes its head's weight, not compiled",
        shard="fully_shard(model)",
        compiled=UNCOMPILED,
        train="def assigned(self, x, ids):\n"
        "    w = self.head.weight\n"
        "    w = w.full_tensor() if hasattr(w, 'full_tensor') else w\n"
        "    return F.linear(self.m(x), w, self.head.bias)\n"
        "model.forward = assigned.__get__(model)\n" + trained().strip(),
    ),
    Row(
        "full values loaded by `load_state_dict` after the first step",
        train=trained(
            update="optimizer.step()\nif step == 0:\n"
            "    model.load_state_dict({k: torch.ones(v.shape, dtype=v.dtype) for k, v in model.state_dict().items()})"
        ),
    ),
    Row(
        "`weight[i].zero_()` between steps",
        train=trained(update="optimizer.step()\nwith torch.no_grad():\n    model.m.weight[5].zero_()"),
    ),
    Row(
        "the largest gradient by `p.grad.abs().max().item()`",
        train=trained(
            update="side.note('max', torch.tensor(max(p.grad.abs().max().item() for p in model.parameters())))\n"
            "optimizer.step()"
        ),
    ),
    # Steps.
    Row(
        "a compiled step that clips",
        compiled="def step(x, ids):\n    return loss(model(x, ids))\nreturn torch.compile(step, **BACKEND)",
        train=trained(
            update="clip = torch.compile(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1), **BACKEND)\n"
            "side.note('norm', clip())\noptimizer.step()"
        ),
    ),
    Row(
        "LBFGS",
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
        train="seen = []\n"
        "handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda g: seen.append(1))\n"
        + trained().strip()
        + "\nside.note('hooks ran', torch.tensor(float(len(seen) > 0)))",
    ),
)
