"""Parameters whose class says how they are gathered: what is sent and saved, when methods count, what is refused."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from fsdp_compile import EMA, FSDPCompileError, fully_shard
from tests.beside import compile_eagerly
from tests.fake_world import fake_world
from tests.models.extended import Eight, Half, Layers, Wrapped
from tests.ranks import run_ranks


def _sharded(kind: type[Wrapped] | None = Half, **arguments: Any) -> Layers:
    torch.manual_seed(0)
    model = Layers(kind)
    for module in (model.up, model.middle, model.down, model):
        fully_shard(module, **arguments)
    return model


def _step(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, seed: int = 100) -> torch.Tensor:
    """One step of plain gradient descent; returns the loss."""
    torch.manual_seed(seed + dist.get_rank())
    loss = call(torch.randn(4, 6)).square().sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None
    return loss.detach()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    local = parameter._local_tensor.detach()
    return local.wrapped if isinstance(local, Wrapped) else local


def _stored(model: Layers) -> Any:
    """This rank's part of a weight, as it is stored."""
    weight: Any = model.up.weight
    return weight._local_tensor


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [_local(parameter).clone() for parameter in model.parameters()]


def _assert_equal(mine: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(_values(mine), _values(theirs), strict=True):
        assert torch.equal(one, other)


class _Rounding:
    """The two methods for a shard that is a plain tensor."""

    calls = 0

    def fsdp_pre_all_gather(self: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        _Rounding.calls += 1
        return Half(self).fsdp_pre_all_gather(mesh, size, stride, module, policy)

    def fsdp_post_all_gather(self: Any, outputs: Any, _metadata: Any, dtype: torch.dtype, **_: Any) -> Any:
        return outputs[0].to(dtype), outputs


def _put_methods_on(model: Layers) -> None:
    for weight in (model.up.weight, model.down.weight):
        shard: Any = weight._local_tensor  # type: ignore[attr-defined]
        shard.fsdp_pre_all_gather = _Rounding.fsdp_pre_all_gather.__get__(shard)
        shard.fsdp_post_all_gather = _Rounding.fsdp_post_all_gather.__get__(shard)


def _methods_of_a_shard() -> None:
    """Methods that are put on local tensors count, before the first forward and after it."""
    for is_compiled in (False, True):
        for is_late in (False, True):
            expected, model = _sharded(), _sharded(None)
            call: Any = compile_eagerly(model) if is_compiled else model
            if is_late:
                plain = call(torch.ones(2, 6))
                assert not torch.equal(plain, expected(torch.ones(2, 6)))
            _put_methods_on(model)
            for _ in range(2):
                assert torch.equal(_step(call, model), _step(expected, expected))
            _assert_equal(model, expected)
    assert _Rounding.calls > 0


@pytest.mark.long
def test_methods_that_are_put_on_shards_count() -> None:
    run_ranks(_methods_of_a_shard)


def _what_is_sent(folder: str) -> None:
    for reshard in (True, False):
        torch._dynamo.reset()
        model = _sharded(Eight, reshard_after_forward=reshard)
        place = f"{folder}/{reshard}"
        call: Any = torch.compile(model, backend="fsdp", fullgraph=True, options={"lower": "eager", "artifacts": place})
        _step(call, model)
        if dist.get_rank() != 0:  # one rank writes them
            continue
        forward, backward = (Path(place, graph, "0-captured.txt").read_text() for graph in _GRAPHS)
        # Two weights in 8 bits, and a scale for each row; in backward the first one is not needed.
        assert _sent_by_the_class(forward) == ["i8[48]", "f32[8]", "i8[48]", "f32[6]"]
        assert _sent_by_the_class(backward) == (["i8[48]", "f32[6]"] if reshard else [])


def _sent_by_the_class(graph: str) -> list[str]:
    """Dtypes and sizes of the messages of all-gathers that are not of the passes."""
    return re.findall(r"= all_gather\([^=]*\) : (\S+)", graph)


_GRAPHS = ("graph00-forward", "graph01-backward")


def test_graphs_send_what_the_class_says_and_gather_again_in_backward() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_what_is_sent, folder)


class Misread(Half):
    """One whose tensors cannot be made of their parts: its method gives a plain one."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> torch.Tensor:  # type: ignore[override]
        return inner["wrapped"]


def _outside_of_graphs() -> None:
    expected, model = _sharded(), _sharded(Misread)
    compiled = compile_eagerly(model)
    for _ in range(2):
        assert torch.equal(_step(compiled, model), _step(expected, expected))
    _assert_equal(model, expected)


def test_a_class_that_compilers_cannot_trace_is_read_outside_of_graphs() -> None:
    run_ranks(_outside_of_graphs)


class Weighted(Half):
    """One whose method reads attributes that are no tensors."""

    factor = 1.0

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        inputs, _ = super().fsdp_pre_all_gather(mesh, size, stride, module, policy)
        return inputs, self.factor * getattr(module, "factor", 1.0) * (5.0 if module.training else 7.0)

    def fsdp_post_all_gather(self, outputs: Any, _metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        assert out is None
        return outputs[0].to(param_dtype) * _metadata, outputs


def _changing_attributes() -> None:
    model = _sharded(Weighted)
    layer: Any = model.up
    compiled = compile_eagerly(model)
    batch, found = torch.ones(2, 6), []
    for owner, factor in ((Weighted, 1.0), (Weighted, 2.0), (Weighted, 1.0), (_stored(model), 3.0), (layer, 4.0)):
        owner.factor = factor
        for is_training in (True, False, True):
            found.append(model.train(is_training)(batch))
            assert torch.equal(compiled(batch), found[-1])
    assert torch.equal(found[0], found[6])
    assert len({float(each.sum()) for each in found}) == 8
    call = compile_eagerly(lambda x: 2 * model(x))
    for is_training in (True, False):
        expected = 2 * model.train(is_training)(batch)
        assert torch.equal(call(batch), expected)
    layer.factor = 5.0
    with pytest.raises(FSDPCompileError, match="a plain attribute of a shard, of its class or of its module changed"):
        call(batch)


def _attributes_of_equal_hash() -> None:
    """`hash(-1) == hash(-2)`."""
    model = _sharded(Weighted)
    layer: Any = model.up
    compiled, function = compile_eagerly(model), compile_eagerly(lambda x: model(x) + 0)
    batch = torch.ones(2, 6)
    for factor in (-1, -2, -1.0, -2.0):
        layer.factor = factor
        assert torch.equal(compiled(batch), model(batch))
    function(batch)
    layer.factor = -1.0
    with pytest.raises(FSDPCompileError, match="a plain attribute of a shard, of its class or of its module changed"):
        function(batch)


class Reducing(Half):
    """One whose methods ask for values, of the shard and of other tensors, and reduce in place."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        largest = self.wrapped.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        module.history.copy_(largest)
        inputs, _ = Half(self.wrapped / module.history).fsdp_pre_all_gather(mesh, size, stride, module, policy)
        return inputs, largest.item()

    def fsdp_post_all_gather(self, outputs: Any, _metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        assert out is None
        return outputs[0].to(param_dtype) * _metadata, outputs


class Traced(Half):
    """The same without values, and with a functional collective."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        largest = funcol.all_reduce(self.wrapped.abs().max(), "max", mesh)
        inputs, _ = Half(self.wrapped / largest).fsdp_pre_all_gather(mesh, size, stride, module, policy)
        return inputs, largest

    fsdp_post_all_gather = Reducing.fsdp_post_all_gather


def _with_history(kind: type[Wrapped]) -> Layers:
    model = _sharded(kind)
    for layer in (model.up, model.down):
        layer.register_buffer("history", torch.zeros(()), persistent=False)
    return model


def _values_in_methods() -> None:
    expected = _with_history(Reducing)
    for kind, fullgraph in ((Reducing, False), (Traced, True)):
        torch._dynamo.reset()
        model = _with_history(kind)
        compiled: Any = torch.compile(model, backend="fsdp", fullgraph=fullgraph, options={"lower": "eager"})
        expected = _with_history(Reducing)
        for _ in range(2):
            assert torch.equal(_step(compiled, model), _step(expected, expected))
        _assert_equal(model, expected)
    whole: Any = torch.compile(_with_history(Reducing), backend="fsdp", fullgraph=True, options={"lower": "eager"})
    with pytest.raises(Exception, match=r"torch.compiler.disable"):
        whole(torch.ones(2, 6))
    # Nothing has run the methods before a compiled function meets them: a named error.
    model = _with_history(Reducing)
    with pytest.raises(Exception, match=r"collective that writes in place \(c10d\.allreduce_"):
        compile_eagerly(lambda x: 2 * model(x))(torch.ones(2, 6))


@pytest.mark.long
def test_methods_that_ask_for_values_run_outside_of_graphs() -> None:
    run_ranks(_values_in_methods)


class Writing(Layers):
    """One whose forward writes into a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


def _writes() -> None:
    for kind, is_compiled in ((Half, False), (Half, True), (Reducing, True)):
        torch._dynamo.reset()
        model = Writing(kind)
        model.up.register_buffer("history", torch.zeros(()))
        model.down.register_buffer("history", torch.zeros(()))
        fully_shard(model)
        with pytest.raises(Exception, match="gathered parameter"):
            (compile_eagerly(model) if is_compiled else model)(torch.ones(2, 6))


def test_writes_into_a_gathered_one_are_refused() -> None:
    run_ranks(_writes)


class Scaled(Half):
    """One that gets another tensor later, which its method to make it anew does not know."""

    scale: torch.Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped", *(["scale"] if self.scale is not None else [])], None

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        scale = 1.0 if self.scale is None else self.scale
        return Half(self.wrapped * scale).fsdp_pre_all_gather(mesh, size, stride, module, policy)


def _tensors_that_come_later() -> None:
    model = _sharded(Scaled)
    compiled, batch, found = compile_eagerly(model), torch.ones(2, 6), []
    for scale in (None, torch.tensor(2.0), torch.tensor(3.0), None):
        _stored(model).scale = scale
        found.append(model(batch))
        assert torch.equal(compiled(batch), found[-1])
    assert torch.equal(found[0], found[3])
    assert len({float(each.sum()) for each in found}) == 3


@pytest.mark.long
def test_tensors_that_a_shard_gets_later_are_read() -> None:
    run_ranks(_tensors_that_come_later)


def test_attributes_that_methods_read_are_followed() -> None:
    run_ranks(_changing_attributes)
    run_ranks(_attributes_of_equal_hash)


def _stays_unsharded() -> None:
    for is_compiled in (False, True):
        expected, model = _sharded(), _sharded()
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        call: Any = compile_eagerly(model) if is_compiled else model
        for _ in range(3):  # the values that stay are outdated by each step
            assert torch.equal(_step(call, model), _step(expected, expected))
        model.reshard()  # type: ignore[operator]
        model.unshard(async_op=True).wait()  # type: ignore[operator]
        assert torch.equal(_step(call, model), _step(expected, expected))


def test_unsharded_values_follow_updates() -> None:
    run_ranks(_stays_unsharded)


def _other_values(folder: str) -> None:
    """State dicts, checkpoints, and new parameters in the place of others."""
    model, other = _sharded(), _sharded()
    compiled = compile_eagerly(other)
    for _ in range(2):
        _step(model, model)
    compiled(torch.ones(2, 6))
    other.load_state_dict(model.state_dict())
    assert torch.equal(compiled(torch.ones(2, 6)), model(torch.ones(2, 6)))
    other.load_state_dict({name: value.clone() for name, value in _sharded().state_dict().items()}, assign=True)
    assert torch.equal(compiled(torch.ones(2, 6)), _sharded()(torch.ones(2, 6)))
    with torch.serialization.safe_globals([Half]):
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    _assert_equal(other, model)
    assert torch.equal(compiled(torch.ones(2, 6)), model(torch.ones(2, 6)))
    for kind in (Eight, None):  # another class, or none
        torch.manual_seed(5)
        value = torch.randn(8, 6)
        other.up.weight = nn.Parameter(value if kind is None else kind(value))
        assert torch.equal(compiled(torch.ones(2, 6)), other(torch.ones(2, 6)))
        assert type(_stored(other)) is (kind or torch.Tensor)
        assert torch.equal(_local(other.up.weight), value.chunk(2)[dist.get_rank()])


@pytest.mark.long
def test_values_that_are_loaded_or_assigned_are_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_other_values, folder)


def _updated() -> None:
    """Optimizers that see several parameters as one, or step in backward, leave these to themselves."""

    def run(change: Callable[[torch.optim.Optimizer], object], *, is_compiled: bool) -> Layers:
        model = _sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        change(optimizer)
        call: Any = compile_eagerly(model) if is_compiled else model
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            call(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    expected = run(lambda _: None, is_compiled=False)
    assert not torch.equal(_values(expected)[0], _values(_sharded())[0])
    for change in (fsdp_compile.flat_step, fsdp_compile.step_in_backward):
        for is_compiled in (False, True):
            _assert_equal(run(change, is_compiled=is_compiled), expected)


def test_optimizers_of_this_package_update_it() -> None:
    run_ranks(_updated)


def _taken_over() -> None:
    expected = _sharded()
    torch.manual_seed(0)
    model = Layers(Half)
    for module in (model.up, model.middle, model.down, model):
        torch.distributed.fsdp.fully_shard(module)
    compiled = compile_eagerly(model)
    for _ in range(2):
        assert torch.equal(_step(compiled, model), _step(expected, expected))
    _assert_equal(model, expected)


def test_a_model_of_fsdp2_is_taken_over() -> None:
    run_ranks(_taken_over)


def _replicated() -> None:
    fully_shard(Layers(Half), sharding_strategy=ShardingStrategy.NO_SHARD)


def _whole_step() -> None:
    model = _sharded()
    model(torch.ones(2, 6)).sum().backward()
    fsdp_compile.whole_step(torch.optim.SGD(model.parameters(), lr=0.1)).step()


def _full_params() -> None:
    with fsdp_compile.full_params(_sharded()):
        pass


def _materialize() -> None:
    with torch.device("meta"):
        model = Layers(Half)
    fsdp_compile.materialize(fully_shard(model))


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "no methods": (lambda: _sharded(Wrapped)(torch.ones(2, 6)), "weight", "no fsdp_pre_all_gather and no fsdp_post"),
    "dimension": (
        lambda: _sharded(shard_placement_fn=lambda p: Shard(p.dim() - 1)),
        "shard_placement_fn",
        "dimension 1",
    ),
    "offload": (lambda: _sharded(offload_policy=CPUOffloadPolicy()), "offload_policy", "offloaded"),
    "replicated": (_replicated, "sharding_strategy", "replicated"),
    "values of the first rank": (lambda: _sharded(sync_module_states=True), "sync_module_states", "first rank"),
    "whole step": (_whole_step, "whole_step(optimizer)", "what its full value is"),
    "full_params": (_full_params, "full_params()", "what its full value is"),
    "full_tensors": (lambda: list(fsdp_compile.full_tensors(_sharded())), "full_tensors", "what its full value is"),
    "EMA": (lambda: EMA(_sharded(), decay=0.9), "EMA", "what its full value is"),
    "materialize": (_materialize, "materialize()", "what its full value is"),
    "explain": (lambda: fsdp_compile.explain(Layers(Half), torch.ones(2, 6)), "explain(Layers), up.weight", "values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_it_is_refused_by_name(case: str) -> None:
    run, where, what = REFUSED[case]
    with fake_world(2), pytest.raises(FSDPCompileError) as caught:
        run()
    assert where in str(caught.value.where)
    assert what in caught.value.what
    assert caught.value.instead


def test_methods_that_are_put_on_shards_do_not_go_with_every_option() -> None:
    with fake_world(2):
        model = _sharded(None, shard_placement_fn=lambda p: Shard(p.dim() - 1))
        _put_methods_on(model)
        with pytest.raises(FSDPCompileError, match=r"(?s)sharded on dimension 1.*weight"):
            model(torch.ones(2, 6))


class Transposing(Half):
    """One that gives something else."""

    def fsdp_post_all_gather(self, outputs: Any, _metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        assert out is None
        return outputs[0].T.to(param_dtype), outputs


def test_an_unsharded_parameter_of_another_shape_is_refused() -> None:
    with fake_world(2):
        model = _sharded(Transposing)
        with pytest.raises(FSDPCompileError, match=r"(?s)returned a tensor of shape \(6, 8\).*\(8, 6\)"):
            model(torch.ones(2, 6))


def _without_padding(self: Any, _mesh: object) -> Any:
    return (self.wrapped.bfloat16(),), None


def test_rows_that_are_missing_are_refused_where_they_are() -> None:
    with fake_world(2, rank=1):
        model = fully_shard(Layers(Half, rows=7))
        shard = _stored(model)
        shard.fsdp_pre_all_gather = _without_padding.__get__(shard)
        with pytest.raises(FSDPCompileError, match=r"(?s)a rank that has 3 rows, and others have 4.*up\.weight"):
            model(torch.ones(2, 6))
