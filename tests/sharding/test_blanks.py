"""What no initialization has written is refused, also where a dtype has no marks or `to_empty()` made the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fsdp_compile.sharding.blanks import Blanks
from torch import nn

from fsdp_compile import ConfigError, fully_shard
from tests.ranks import run_ranks


class _Masked(nn.Module):
    """A causal mask that its constructor makes."""

    mask: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("mask", torch.ones(4, 4).tril().to(dtype), persistent=False)


def _forget(module: nn.Module) -> None:
    if isinstance(module, _Masked):
        nn.init.ones_(module.weight)


def _forget_emptied(module: nn.Module) -> None:
    if isinstance(module, _Masked) and module.weight.is_meta:
        module.to_empty(device="cpu")
        nn.init.ones_(module.weight)


def _write(module: nn.Module) -> None:
    if isinstance(module, _Masked):
        nn.init.ones_(module.weight)
        module.mask[1:].copy_(torch.ones(4, 4).tril()[1:])  # through a view
        module.mask[0] = torch.tensor([1, 0, 0, 0])


def _make_anew(module: nn.Module) -> None:
    if isinstance(module, _Masked):
        nn.init.ones_(module.weight)
        module.mask = torch.tensor([[column <= row for column in range(4)] for row in range(4)]).to(module.mask.dtype)


def _write_from_above(module: nn.Module) -> None:
    _forget(module)
    if isinstance(module, nn.Sequential):
        masked = module[1]
        assert isinstance(masked, _Masked)
        masked.mask.copy_(torch.ones(4, 4).tril())


def _check(init: Callable[[nn.Module], None], dtype: torch.dtype, *, is_whole: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.ReLU(), _Masked(dtype))
    if not is_whole:
        with pytest.raises(ConfigError, match="without a value"):
            fully_shard(model, param_init_fn=init)
        return
    fully_shard(model, param_init_fn=init)
    assert torch.equal(dict(model.named_buffers())["1.mask"], torch.ones(4, 4).tril().to(dtype))


def _check_all() -> None:
    for dtype in (torch.bool, torch.uint8, torch.float32):
        for init in (_forget, _forget_emptied):
            _check(init, dtype, is_whole=False)
        for init in (_write, _make_anew, _write_from_above):
            _check(init, dtype, is_whole=True)


def test_buffers_that_no_initialization_wrote_are_refused() -> None:
    run_ranks(_check_all)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64, torch.complex64])
def test_blanks_of_every_dtype(dtype: torch.dtype) -> None:
    blanks = Blanks()
    value = blanks.make(torch.empty(3, dtype=dtype, device="meta"), torch.device("cpu"))
    assert blanks.have(value)
    value.zero_()
    blanks.note_written([value])
    assert not blanks.have(value)
    assert not blanks.have(blanks.make(torch.empty(0, dtype=dtype), torch.device("cpu"))), "nothing is missing"
