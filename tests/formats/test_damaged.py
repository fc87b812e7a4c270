"""Files that are not what was written, or were made to do harm: file and cause are named, nothing is executed."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.cli.main import main
from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.checkpoint import Format, open_checkpoint, verify_checkpoint
from fsdp_compile.formats.convert import ConvertOptions, convert_checkpoint
from tests.formats.damage import Hostile, harm_in_entry, harm_in_metadata, in_metadata, move_shards, replace, truncate
from tests.formats.samples import save_sharded, save_steps
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    save_sharded(folder / "dcp")
    save_steps(folder / "steps")
    part = ConvertOptions(Format.TORCH, part="model")
    convert_checkpoint(folder / "dcp", folder / "model.pt", part)
    convert_checkpoint(folder / "model.pt", folder / "model.safetensors", ConvertOptions(Format.SAFETENSORS))
    options = ConvertOptions(Format.SAFETENSORS, max_shard_gb=3e-7)
    convert_checkpoint(folder / "model.pt", folder / "hf", options)
    return folder


def _flip(file: Path) -> None:
    """Changes a bit of the first tensor that `torch.save` wrote into a file."""
    contents = bytearray(file.read_bytes())
    start = 0
    while True:  # through the records of zip files, whose headers have 30 bytes, a name and a filler
        start = contents.index(b"PK\x03\x04", start + 1)
        of_name, of_filler = struct.unpack_from("<HH", contents, start + 26)
        if contents[start + 30 : start + 30 + of_name].endswith(b"data/0"):
            break
    contents[start + 30 + of_name + of_filler] ^= 1
    file.write_bytes(contents)


def _harm(file: Path) -> None:
    torch.save({"weight": torch.ones(2), "harm": Hostile(file.parent / "executed")}, file)


def _harm_by_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps(Hostile(file.parent / "executed"), protocol=2))


def _change_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.first.weight"].properties.dtype = torch.int32


def _contradict(metadata: Any) -> None:
    metadata.planner_data["model.scale"] = ("model", "first.weight")


def _rename_in_index(file: Path) -> None:
    file.write_text(file.read_text().replace("first.weight", "first.weihgt"))


def _forget_in_index(file: Path) -> None:
    index = json.loads(file.read_text())
    del index["weight_map"]["first.weight"]
    file.write_text(json.dumps(index))


def _point_elsewhere(file: Path) -> None:
    file.write_text(file.read_text().replace("model-00001", "../model-00001"))


DAMAGE: dict[str, tuple[str, str, Callable[[Path], Any], str]] = {
    "shard, missing": ("dcp", "__1_0.distcp", Path.unlink, "cannot read {file}: No such file or directory"),
    "shard, cut off": ("dcp", "__1_0.distcp", truncate, "{file} has "),
    "shard, flipped": ("dcp", "__0_0.distcp", _flip, "the contents of {file}, bytes "),
    "shard, foreign": ("dcp", "__2_0.distcp", replace, "{file} has 700 bytes, and should have "),
    "metadata, cut off": ("dcp", ".metadata", truncate, "cannot read {file}: "),
    "metadata, foreign": ("dcp", ".metadata", replace, "cannot read {file}: "),
    "metadata, hostile": ("dcp", ".metadata", harm_in_metadata, "refers to posix.mkdir, which no checkpoint"),
    "a value, hostile": ("dcp", ".metadata", harm_in_entry("optimizer.param_groups.0.lr"), "refers to posix.mkdir,"),
    "another dtype": ("dcp", ".metadata", in_metadata(_change_dtype), "has no torch.int32 for model.first.weight"),
    "a file elsewhere": ("dcp", ".metadata", in_metadata(move_shards), "../step-000001/__"),
    "a place that is taken": ("dcp", ".metadata", in_metadata(_contradict), "the place of model.scale is "),
    "step, flipped": ("steps/step-000002", "__0_0.distcp", _flip, "the contents of {file} have changed: its SHA-256"),
    "step, without file": ("steps/step-000002", "__1_0.distcp", Path.unlink, "cannot read {file}: No such file"),
    "step, marker cut off": ("steps/step-000002", "complete.json", truncate, "cannot read {file}: JSONDecodeError"),
    "torch, cut off": ("model.pt", "", truncate, "{file} is cut off, or no file of torch.save"),
    "torch, flipped": (
        "model.pt",
        "",
        _flip,
        "the contents of {file} have changed: Bad CRC-32 for file 'archive/data/0'",
    ),
    "torch, hostile": (
        "model.pt",
        "",
        _harm,
        "cannot read {file}: it refers to posix.mkdir, which no checkpoint",
    ),
    "a pickle": ("model.pt", "", _harm_by_pickle, "{file} is cut off, or no file of torch.save"),
    "empty": ("model.pt", "", lambda file: file.write_bytes(b""), "{file} is cut off, or no file of torch.save"),
    "foreign": ("model.pt", "", replace, "{file} is cut off, or no file of torch.save"),
    "no dictionary": ("model.pt", "", lambda file: torch.save([torch.ones(2)], file), "{file} holds a list"),
    "safetensors, cut off": ("model.safetensors", "", truncate, "cannot read {file}: "),
    "index, missing": ("hf", "model.safetensors.index.json", Path.unlink, "4 files of safetensors and no"),
    "index, cut off": ("hf", "model.safetensors.index.json", truncate, "cannot read {file}: JSONDecodeError"),
    "index, another name": ("hf", "model.safetensors.index.json", _rename_in_index, "disagree about first.weight"),
    "index, no name": ("hf", "model.safetensors.index.json", _forget_in_index, "disagree about first.weight"),
    "index, elsewhere": ("hf", "model.safetensors.index.json", _point_elsewhere, "refers to ../model-00001-of-00004"),
    "a shard, missing": ("hf", "model-00002-of-00004.safetensors", Path.unlink, "cannot read {file}: No such file"),
    "a shard, cut off": ("hf", "model-00002-of-00004.safetensors", truncate, "cannot read {file}: "),
}
"""The checkpoint, its file that is damaged, how, and a part of what is said."""


@pytest.mark.parametrize("name", DAMAGE)
def test_file_and_cause_are_named(name: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, inner, damage, said = DAMAGE[name]
    copied = tmp_path / "copy"
    shutil.copytree(written, copied)
    assert main(["checkpoint", "verify", str(copied / checkpoint)]) == 0
    file = copied / checkpoint / inner
    damage(file)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(copied / checkpoint)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said.format(file=file) in shown.err
    assert str(copied) in shown.err
    assert len(shown.err.splitlines()) <= 2
    assert not list(copied.rglob("executed"))


def test_the_hostile_files_would_do_what_they_say(written: Path, tmp_path: Path) -> None:
    """So that the test before tests something."""
    shutil.copy(written / "model.pt", tmp_path)
    _harm(tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2], ids=str)
def test_values_that_are_not_finite_are_found_if_asked_for(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.ones(3, 2)
    weight[1, 1] = value
    torch.save({"fine": torch.ones(2), "count": torch.tensor(3), "weight": weight.to(dtype)}, tmp_path / "a.pt")
    verify_checkpoint(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"weight in {tmp_path}/a.pt has values that are not finite"):
        verify_checkpoint(tmp_path / "a.pt", finite=True)


def _save_local(folder: Path) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 7), device_id=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=folder / "dcp")
    if dist.get_rank() == 0:
        torch.save(state, folder / "rank0.pt")


def test_flat_parameters_of_fsdp1_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_save_local, tmp_path)
    with pytest.raises(CheckpointError, match=r"LOCAL_STATE_DICT of FSDP1: model\._flat_param") as caught:
        open_checkpoint(tmp_path / "dcp")
    assert "SHARDED_STATE_DICT" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"ShardedTensor, which no checkpoint of full values needs"):
        open_checkpoint(tmp_path / "rank0.pt")


def _save_rows(folder: Path) -> None:
    model = fully_shard(nn.Linear(4, 7))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "rank0.pt")
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True))


def test_files_of_one_ranks_rows_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_save_rows, tmp_path)
    with pytest.raises(CheckpointError, match=r"which no checkpoint of full values|weight in .* is a DTensor"):
        open_checkpoint(tmp_path / "rank0.pt")
    file = sorted((tmp_path / "hf").iterdir())[0]
    with pytest.raises(CheckpointError, match="has rows of one rank, and does not say of how many"):
        open_checkpoint(file)


def test_a_shard_by_itself_is_refused(written: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is cut off, or no file of torch\.save"):
        open_checkpoint(written / "dcp" / "__0_0.distcp")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(CheckpointError, match=r"has no \.metadata, 0 files of safetensors and no model"):
        open_checkpoint(tmp_path)


def test_tensors_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    contents = (tmp_path / "a.safetensors").read_bytes().replace(b'"F32"', b'"F9_"')
    (tmp_path / "a.safetensors").write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"cannot read {tmp_path}/a.safetensors: SafetensorError"):
        open_checkpoint(tmp_path / "a.safetensors")
