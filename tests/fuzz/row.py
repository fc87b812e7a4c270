"""A row of the catalogue of awkward programs, and parts that rows have in common."""

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
SGD: Final = "torch.optim.SGD(model.parameters(), lr=0.1)"
ADAMW: Final = "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)"
MODULE: Final = "module = torch.compile(model, **BACKEND)\nreturn lambda x, ids: loss(module(x, ids))"
METHOD: Final = "model.compile(**BACKEND)\nreturn lambda x, ids: loss(model(x, ids))"
FUNCTION: Final = "return torch.compile(lambda x, ids: loss(model(x, ids)), **BACKEND)"
LINEAR: Final = "self.m = nn.Linear(6, 6)"
BLOCK: Final = (
    "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.inner = nn.Linear(6, 6)\n\n    def forward(self, x):\n        return self.inner(x)"
)
WEIGHT: Final = "self.w = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))"
CALL: Final = "return self.head(self.m(x))"
UNCOMPILED: Final = "return lambda x, ids: loss(model(x, ids))"


@dataclasses.dataclass(frozen=True)
class Row:
    """One program."""

    says: str  # what it does, in a few words
    init: str = LINEAR  # lines of the model's constructor; `self.head` is there
    forward: str = CALL  # lines of `forward(self, x, ids)`
    loss: str = "out.square().mean()"  # of what forward returns, `out`
    before: str = ""  # lines above the model
    shard: str = "pass"  # body of `shard(model, fully_shard)`
    compiled: str = MODULE  # body of `compiled(model)`
    # Body of `train(model, call, side)`.
    train: str = _TRAIN.format(optimizer=SGD, backward="side.backward(call(x, ids))", update="optimizer.step()")
    options: str = "{'backend': 'fsdp', 'options': {'lower': 'eager'}}"  # of the backend, as text

    def text(self) -> str:
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

    def also_uncompiled(self) -> tuple[Row, Row]:
        """The row, and one of the same model, which is sharded first and not compiled."""
        says = f"{self.says}, not compiled"
        return self, dataclasses.replace(self, says=says, shard="fully_shard(model)", compiled=UNCOMPILED)


def _function(signature: str, body: str) -> str:
    return f"def {signature}:\n" + textwrap.indent(body, " " * 4)


def trained(
    backward: str = "side.backward(call(x, ids))", update: str = "optimizer.step()", optimizer: str = SGD
) -> str:
    indented = textwrap.indent(backward, " " * 8).lstrip()
    return _TRAIN.format(optimizer=optimizer, backward=indented, update=textwrap.indent(update, " " * 4).lstrip())


def noted(gradient: str) -> str:
    """A loop that trains, and notes a gradient by `x` beside it."""
    return trained(f"x.requires_grad_()\nside.note_own('by x', {gradient})\nside.backward(call(x, ids))")


LSTM: Final = "self.m = nn.LSTM(6, 6)"
RECURRENT: Final = "return self.head(self.m(x.unsqueeze(1))[0].squeeze(1))"
SEQUENTIAL: Final = "self.m = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))"

STATISTICS: Final = (
    "self.v = nn.Parameter(torch.zeros(6), requires_grad=False)\n"
    "self.u = nn.Parameter(torch.ones(6), requires_grad=False)"
)
NORMALIZED: Final = "return self.head(F.batch_norm(x, self.v, self.u, training=True) + self.v)"
ACCUMULATED: Final = trained("side.backward(call(x, ids))\nside.backward(call(x, ids))")
