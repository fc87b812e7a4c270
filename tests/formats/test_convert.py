"""Values of a checkpoint in another format: bit for bit, streamed, in full or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import nn

from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.checkpoint import Checkpoint, Format, open_checkpoint, verify_checkpoint
from fsdp_compile.formats.convert import ConvertOptions, convert_checkpoint
from tests import long
from tests.formats.samples import assert_same, save_sharded, save_steps, state
from tests.models.outlines import MixedKinds

TORCH = ConvertOptions(Format.TORCH)
DCP = ConvertOptions(Format.DCP)
SAFETENSORS = ConvertOptions(Format.SAFETENSORS)


def _values(path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.values}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded") / "dcp"
    return folder, save_sharded(folder)


def test_values_go_through_all_formats_bit_for_bit(tmp_path: Path) -> None:
    expected = state()
    torch.save(expected, tmp_path / "a.pt")
    path = tmp_path / "a.pt"
    chain = [
        ("a again.pt", TORCH),
        ("b", DCP),
        ("c.safetensors", SAFETENSORS),
        ("d", replace(SAFETENSORS, max_shard_gb=1e-7)),
        ("e.pt", TORCH),
        ("f.safetensors", SAFETENSORS),
        ("g.pt", TORCH),
        ("h", SAFETENSORS),
        ("i", DCP),
        ("j", DCP),
        ("k.pt", TORCH),
    ]
    for name, options in chain:
        convert_checkpoint(path, tmp_path / name, options)
        path = tmp_path / name
        assert_same(_values(path), expected)
        verify_checkpoint(path)
    assert_same(torch.load(path, weights_only=True), expected)
    assert_same(load_file(tmp_path / "c.safetensors"), expected)
    loaded = {name: torch.empty_like(value) for name, value in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "j", no_dist=True)
    assert_same(loaded, expected)
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", *(name for name, _ in chain)}


@pytest.mark.long
def test_what_several_ranks_wrote_becomes_one_file(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, expected = sharded
    convert_checkpoint(folder, tmp_path / "all.pt", TORCH)
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True), expected)
    convert_checkpoint(folder, tmp_path / "model", replace(SAFETENSORS, part="model", max_shard_gb=3e-7))
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert files[0] == "model-00001-of-00004.safetensors"
    assert files[-1] == "model.safetensors.index.json"
    assert_same(_values(tmp_path / "model"), expected["model"])
    convert_checkpoint(tmp_path / "all.pt", tmp_path / "dcp", DCP)
    convert_checkpoint(tmp_path / "dcp", tmp_path / "again.pt", TORCH)
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True), expected)
    model = MixedKinds()
    model.load_state_dict(torch.load(tmp_path / "again.pt", weights_only=True)["model"])


def test_a_step_of_a_run_becomes_a_file(tmp_path: Path) -> None:
    save_steps(tmp_path)
    convert_checkpoint(tmp_path / "step-000002", tmp_path / "model.pt", replace(TORCH, part="model"))
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same(loaded, {"weight": torch.full((7, 4), 2.0), "bias": torch.full((7,), 2.0)})


def test_names_and_dtypes_are_changed_as_asked(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, expected = sharded
    options = replace(TORCH, part="model", strip_prefix="first.", prefix="all.", dtype="bfloat16")
    convert_checkpoint(folder, tmp_path / "model.pt", options)
    renamed = {f"all.{name.removeprefix('first.')}": value for name, value in expected["model"].items()}
    cast = {n: v.bfloat16() if v.is_floating_point() else v for n, v in renamed.items()}
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), cast)


def test_one_memory_is_written_once(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.safetensors", SAFETENSORS)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert "tied" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "tied": "weight"}
    convert_checkpoint(tmp_path / "b.safetensors", tmp_path / "c.pt", TORCH)
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded["tied"].data_ptr() == loaded["weight"].data_ptr()
    filled = [value for value in loaded.values() if value.numel()]
    assert len({value.untyped_storage().data_ptr() for value in filled}) == len(filled) - 1


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 4, bias=False)
        self.first = nn.Linear(4, 4, bias=False)
        self.first.weight = self.second.weight


def test_tied_models_of_safetensors_own_functions_come_and_go(tmp_path: Path) -> None:
    model = _Tied()
    save_model(model, str(tmp_path / "theirs.safetensors"))
    convert_checkpoint(tmp_path / "theirs.safetensors", tmp_path / "a.pt", TORCH)
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True), model.state_dict())
    torch.save(model.state_dict(), tmp_path / "b.pt")
    convert_checkpoint(tmp_path / "b.pt", tmp_path / "ours.safetensors", SAFETENSORS)
    other = _Tied()
    missing, unexpected = load_model(other, tmp_path / "ours.safetensors")
    assert not missing
    assert not unexpected
    assert_same(other.state_dict(), model.state_dict())


def test_others_may_read_what_they_may_read_elsewhere(tmp_path: Path) -> None:
    """safetensors itself gives a file to its owner alone."""
    torch.save(state(), tmp_path / "a.pt")
    (tmp_path / "made").touch()
    for name, options in [("b.safetensors", SAFETENSORS), ("c.pt", TORCH)]:
        convert_checkpoint(tmp_path / "a.pt", tmp_path / name, options)
        assert (tmp_path / name).stat().st_mode == (tmp_path / "made").stat().st_mode


def _in_memory() -> int:
    """Bytes of this process that are in no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@long.parametrize(
    "options", [TORCH, DCP, SAFETENSORS, replace(DCP, dtype="bfloat16")], always=[DCP, SAFETENSORS], ids=str
)
@long.parametrize("source", ["a.pt", "b", "c.safetensors"], always=["b"])
def test_memory_does_not_grow_with_the_checkpoint(
    source: str, options: ConvertOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor has 4 MB, and all have 160 MB."""
    torch.save({f"weight{n}": torch.randn(1_000_000) for n in range(40)}, tmp_path / "a.pt")
    if source != "a.pt":
        convert_checkpoint(tmp_path / "a.pt", tmp_path / source, DCP if source == "b" else SAFETENSORS)
    most, before = 0, _in_memory()

    def noting(called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal most
            most = max(most, _in_memory())
            return called(*args)

        return call

    monkeypatch.setattr(Checkpoint, "read", noting(Checkpoint.read))
    monkeypatch.setattr(os, "fsync", noting(os.fsync))
    convert_checkpoint(tmp_path / source, tmp_path / "target", options)
    assert 0 < most < before + 40e6


def test_a_list_in_a_checkpoint_comes_back(tmp_path: Path) -> None:
    inner = [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": []}]
    values = {"state": {"a": {"step": torch.tensor(2.0)}}, "groups": inner, "tensors": [torch.ones(2), torch.zeros(1)]}
    torch.save(values, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", DCP)
    convert_checkpoint(tmp_path / "b", tmp_path / "c.pt", TORCH)
    assert_same(torch.load(tmp_path / "c.pt", weights_only=True), values)


def test_what_has_no_place_is_left_out_by_name(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="epoch is no tensor"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.safetensors", SAFETENSORS)
    options = replace(SAFETENSORS, drop_others=True)
    written, left_out = convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.safetensors", options)
    assert (list(written), left_out) == (["weight"], ["epoch"])
    assert_same(load_file(tmp_path / "b.safetensors"), {"weight": torch.ones(2)})


OPTIMIZER = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
NESTED = {"model": {"weight": torch.full((2,), 1e5)}, "optimizer": OPTIMIZER, "epoch": 3}
REFUSED: dict[str, tuple[object, ConvertOptions, str]] = {
    "numbers of parameters": (NESTED, DCP, "optimizer.param_groups.0.params in {a} are numbers"),
    "the same to torch": (OPTIMIZER, TORCH, "param_groups.0.params in {a} are numbers"),
    "no such part": (NESTED, replace(TORCH, part="modle"), "{a} has no modle to convert"),
    "a part of a flat file": ({"model.weight": torch.ones(2)}, replace(DCP, part="model"), "--strip-prefix model."),
    "dictionaries for safetensors": ({"a": {"b": torch.ones(2)}}, SAFETENSORS, "--part a"),
    "a dtype for all": ({"a": {"b": torch.ones(2)}}, replace(DCP, dtype="float16"), "--dtype"),
    "a prefix that no name has": ({"a": torch.ones(2)}, replace(DCP, strip_prefix="b."), "no name begins with b."),
    "values that become infinite": (NESTED, replace(TORCH, part="model", dtype="float16"), "float16 cannot hold"),
    "a name twice": (
        {"a.b": torch.ones(2), "b": torch.ones(2)},
        replace(DCP, strip_prefix="a."),
        "two values of the name b",
    ),
    "no dtype of safetensors": ({"a": torch.ones(2, dtype=torch.complex128)}, SAFETENSORS, "torch.complex128"),
    "nothing": ({}, DCP, "has no values to convert"),
    "sparse": ({"a": torch.ones(2).to_sparse()}, DCP, "layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values, options, said = REFUSED[name]
    torch.save(values, tmp_path / "a.pt")
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", options)
    assert said.format(a=tmp_path / "a.pt") in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("ending", [".safetensors", ".distcp"])
def test_a_name_of_another_format_is_refused(ending: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=f"whose name ends in {ending} is taken for one of another format"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / f"b{ending}", TORCH)


def test_optimizers_that_dcp_saved_by_position_are_refused_elsewhere(tmp_path: Path) -> None:
    dcp.save(NESTED, checkpoint_id=tmp_path / "a", no_dist=True)
    for options in (TORCH, replace(TORCH, part="optimizer")):
        with pytest.raises(ConfigError, match=r"optimizer\.param_groups\.0\.params in .* are numbers"):
            convert_checkpoint(tmp_path / "a", tmp_path / "b", options)
    convert_checkpoint(tmp_path / "a", tmp_path / "b.pt", replace(TORCH, part="model"))
    convert_checkpoint(tmp_path / "a", tmp_path / "c", DCP)
    loaded = {"optimizer": {"state": {0: {"step": torch.tensor(0.0)}}}}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert loaded["optimizer"]["state"][0]["step"] == 1


def test_a_flipped_bit_is_not_carried_along(tmp_path: Path) -> None:
    weight = torch.randn(7, 6)
    torch.save({"weight": weight}, tmp_path / "a.pt")
    contents = bytearray((tmp_path / "a.pt").read_bytes())
    contents[contents.index(bytes(weight.untyped_storage()))] ^= 1
    (tmp_path / "a.pt").write_bytes(contents)
    assert not torch.equal(torch.load(tmp_path / "a.pt")["weight"], weight)
    with pytest.raises(CheckpointError, match=r"the contents of .*a\.pt have changed"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", DCP)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_what_exists_is_not_touched(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    (tmp_path / "b").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", DCP)
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize("to", Format)
def test_a_conversion_that_fails_leaves_nothing(to: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "a.pt")

    def fail(self: Checkpoint, name: str) -> Any:
        if name == "b":
            raise OSError(28, "No space left on device", "/disk/file")
        return torch.ones(2)

    monkeypatch.setattr(Checkpoint, "read", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", ConvertOptions(to, dtype="bfloat16"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_an_index_is_what_transformers_reads(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.full((10,), float(n)) for n in range(5)}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", replace(SAFETENSORS, max_shard_gb=8e-8))
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {
        "w0": "model-00001-of-00003.safetensors",
        "w1": "model-00001-of-00003.safetensors",
        "w2": "model-00002-of-00003.safetensors",
        "w3": "model-00002-of-00003.safetensors",
        "w4": "model-00003-of-00003.safetensors",
    }
