"""Parameters that have no sharded form are refused by name; those that look alike and have one train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, FSDPCompileError, UnsupportedModelError, fully_shard
from tests import long
from tests.beside import Beside, Run, compile_eagerly
from tests.fake_world import fake_world
from tests.models.outlines import Small
from tests.ranks import run_ranks


class Two(torch.Tensor):
    """Two tensors that act as their sum."""

    first: torch.Tensor
    second: torch.Tensor

    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Two:
        made: Two = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)
        made.first, made.second = first, second
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Two:
        return Two(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].first.detach(), args[0].second.detach())
        plain = torch.utils._pytree.tree_map_only(Two, lambda each: each.first + each.second, args)
        return func(*plain, **(kwargs or {}))


class Marked(nn.Parameter):
    """Plain data, with an attribute."""

    tag: int

    def __new__(cls, data: torch.Tensor, tag: int = 0) -> Marked:
        made = super().__new__(cls, data)
        made.tag = tag
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Marked:
        return Marked(self.data.clone(), self.tag)


class Behaving(nn.Parameter):
    """Plain data, with a method and a constant."""

    scale = 2.0

    def scaled(self) -> torch.Tensor:
        return self * self.scale


class Scaled(Small):
    """One whose forward asks a parameter's class."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight = Behaving(self.up.weight.data)


def _with(change: Callable[[Small], object]) -> Small:
    model = Small()
    change(model)
    return model


def _set(module: nn.Module, value: torch.Tensor) -> None:
    module._parameters["weight"] = value  # type: ignore[assignment]


def _two() -> nn.Parameter:
    return nn.Parameter(Two(torch.ones(7, 6), torch.zeros(7, 6)))


REFUSED = {
    "wrapper": (lambda m: _set(m.up, _two()), UnsupportedModelError, "Two is divided by torch.chunk() into Tensors"),
    "behaviour": (lambda m: _set(m.up, Behaving(m.up.weight.data)), UnsupportedModelError, "which has scale, scaled"),
    "sparse": (lambda m: _set(m.up, nn.Parameter(torch.eye(7, 6).to_sparse())), UnsupportedModelError, "not dense"),
    "complex": (
        lambda m: setattr(m, "up", nn.Linear(6, 7, dtype=torch.complex64)),
        UnsupportedModelError,
        "a parameter is complex (torch.complex64)",
    ),
    "lazy": (lambda m: setattr(m, "up", nn.LazyLinear(7)), ConfigError, "no shape yet"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_parameter_of_another_kind_is_refused_before_anything_is_changed(case: str) -> None:
    change, error, what = REFUSED[case]
    with fake_world(2):
        model = _with(change)
        before = dict(model.named_parameters())
        with pytest.raises(error) as caught:
            fully_shard(model)
        assert isinstance(caught.value, FSDPCompileError)
        assert what in caught.value.what
        assert caught.value.where == "up.weight"
        assert caught.value.instead
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        assert type(model) is Small
        fully_shard(model, ignored_params=[model.up])
        assert model.up.weight is before["up.weight"]
        assert isinstance(model.down.weight, DTensor)


def test_a_parameter_of_another_kind_that_is_assigned_later_is_refused() -> None:
    with fake_world(2):
        model = fully_shard(Small())
        model.up.weight = Behaving(torch.ones(7, 6))
        with pytest.raises(UnsupportedModelError, match=r"(?s)Behaving.*up\.weight"):
            model(torch.ones(2, 6))


def _marked() -> Small:
    return _with(lambda m: _set(m.up, Marked(m.up.weight.data, 3)))


def _check_marked(how: Run) -> None:
    pair = Beside(_marked, how)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for _ in range(3):
        pair.step()
    assert pair.model.get_parameter("up.weight").tag == 3  # type: ignore[attr-defined]


@long.parametrize("how", [Run.PLAIN, Run.EAGER], always=[Run.EAGER], ids=lambda how: how.value)
def test_a_plain_subclass_of_parameter_trains_and_keeps_its_attributes(how: Run) -> None:
    run_ranks(_check_marked, how)


def _first_call_refuses() -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        compile_eagerly(Scaled())(torch.ones(2, 6))
    return str(caught.value)


def test_the_first_compiled_call_refuses_too() -> None:
    for text in run_ranks(_first_call_refuses):
        assert "Behaving" in text
        assert "up.weight" in text


class Shared(nn.Module):
    """Two layers, and a parameter or buffer that `share` makes of the first one's weight."""

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor], *, as_buffer: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        made = share(self.up.weight.data)
        if as_buffer:
            self.register_buffer("other", made)
        else:
            self.other = nn.Parameter(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.other.sum()


SHARED = {
    "the same": lambda w: w,
    "another shape": lambda w: w.view(6, 8),
    "transposed": lambda w: w.t(),
    "a row": lambda w: w[3],
    "a column": lambda w: w[:, 2],
    "by NumPy": lambda w: torch.from_numpy(w.numpy()),
    "another dtype": lambda w: w.view(torch.float16),
}


@pytest.mark.parametrize("as_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("share", SHARED)
def test_tensors_that_share_memory_are_refused(share: str, as_buffer: bool) -> None:  # noqa: FBT001
    with fake_world(2):
        model = Shared(SHARED[share], as_buffer=as_buffer)
        with pytest.raises(UnsupportedModelError) as caught:
            fully_shard(model)
        assert "other and up.weight share memory" in caught.value.what
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        with torch.device("meta"):
            if share != "by NumPy":
                with pytest.raises(UnsupportedModelError, match="share memory"):
                    fully_shard(Shared(SHARED[share], as_buffer=as_buffer))
        if not as_buffer:
            fully_shard(model, ignored_params=[model.other, model.up])  # neither comes apart


class _Views(nn.Module):
    """Views of a parameter that are made once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, 6))
        self.q, self.rest, self.twice = self.qkv[:6], self.qkv.detach(), 2 * self.qkv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.q


def test_views_that_modules_keep_are_refused() -> None:
    with fake_world(2):
        model: Any = nn.Sequential(_Views())
        with pytest.raises(UnsupportedModelError, match=r"0\.q and 0\.qkv share memory"):
            fully_shard(model)
        assert type(model[0].qkv) is nn.Parameter
        with pytest.raises(Exception, match=r"0\.q and 0\.qkv share memory"):
            compile_eagerly(model)(torch.ones(2, 6))
        del model[0].q
        fully_shard(model)


def _written(model: _Views) -> None:
    model.q, model.rest = model.qkv.chunk(2)
    nn.init.ones_(model.qkv)  # autograd has no `grad_fn` of such views any more, and raises an error for it


def _without_history(model: _Views) -> None:
    with torch.no_grad():
        model.q = model.qkv[:6]


def _frozen(model: _Views) -> None:
    model.qkv.requires_grad = False
    model.q = model.qkv[:6]


@pytest.mark.parametrize("keep", [_written, _without_history, _frozen])
def test_views_that_have_no_history_are_refused(keep: Callable[[_Views], None]) -> None:
    with fake_world(2):
        model = _Views()
        keep(model)
        with pytest.raises(UnsupportedModelError, match="q and qkv share memory"):
            fully_shard(model)


def test_detached_tensors_that_modules_keep_are_accepted() -> None:
    with fake_world(2):
        model = torch.nn.utils.spectral_norm(nn.Linear(6, 6))  # keeps `weight.data`
        assert "weight" in vars(model)
        fully_shard(model)


def test_a_second_name_of_a_parameter_is_no_other_tensor() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        for layer, owner in ((model[0], model[0]), (model[1], model)):
            layer.requires_grad_(owner is not model)
            object.__setattr__(owner, "beside", layer.weight)
        fully_shard(model[1])
        fully_shard(model)


def _parts() -> Shared:
    """Rows of one tensor as two parameters, and its columns as two others: neighbours that share no element."""
    model = Shared(torch.empty_like)
    rows, columns = torch.randn(16, 6) / 4, torch.randn(6, 9) / 4  # or it would diverge
    model.up.weight, model.other = nn.Parameter(rows[:8]), nn.Parameter(rows[8:])
    model.down.weight, model.down.bias = nn.Parameter(columns[:, :8]), nn.Parameter(columns[:, 8])
    return model


def _check_parts() -> None:
    pair = Beside(_parts, Run.PLAIN)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(2):
        pair.step()


@pytest.mark.long
def test_parts_of_one_memory_that_do_not_overlap_are_parameters_of_their_own() -> None:
    run_ranks(_check_parts)
