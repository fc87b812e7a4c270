"""`backward(inputs=...)` and `autograd.grad()`: of sharded parameters refused, of everything else as in one process."""

from __future__ import annotations

import pytest
import torch

from fsdp_compile import UnsupportedModelError
from tests import long
from tests.beside import Beside, Run, close, loss_of
from tests.models.outlines import Small
from tests.ranks import run_ranks


def _asked_for_parameters(how: Run) -> None:
    pair = Beside(Small, how)
    pair.backward()
    before = [p.grad for p in pair.model.parameters()]
    chosen = [p for name, p in pair.model.named_parameters() if name.startswith("up.")]
    x = torch.ones(2, 6, requires_grad=True)
    loss = loss_of(pair.compiled(x))
    for call in (
        lambda: loss.backward(inputs=chosen),
        lambda: loss.backward(inputs=[x, chosen[0]]),
        lambda: torch.autograd.grad(loss, chosen),
        lambda: torch.autograd.grad(loss, chosen, allow_unused=True),
    ):
        with pytest.raises(UnsupportedModelError, match=r"(?s)some sharded parameters alone.*up\..*p\.grad = None"):
            call()
    untouched = x.grad is None
    assert untouched
    assert all(p.grad is grad for p, grad in zip(pair.model.parameters(), before, strict=True))
    loss.backward(inputs=[x])
    theirs = torch.ones(2, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(loss_of(pair.reference(theirs)), theirs)
    assert x.grad is not None
    close(x.grad, expected, "x")
    plain = list(pair.reference.up.parameters())  # type: ignore[union-attr, operator, unused-ignore]
    assert all(g is not None for g in torch.autograd.grad(loss_of(pair.reference(theirs)), plain))
    pair.compare()


@long.parametrize("how", [Run.PLAIN, Run.EAGER], always=[Run.PLAIN], ids=lambda how: how.value)
def test_gradients_of_some_sharded_parameters_alone_are_refused(how: Run) -> None:
    run_ranks(_asked_for_parameters, how)
