"""`fsdp-compile checkpoint`: what is in a checkpoint, whether it is right, and the same in another format."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fsdp_compile.config.choices import DTYPES
from fsdp_compile.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fsdp_compile.formats.checkpoint import Checkpoint

NAME = "checkpoint"
ABOUT = "Show, verify and convert checkpoints of any format; needs no model and no ranks, and executes nothing in them."

_STEP = re.compile(r"step-[0-9]+")
_PATH: Final = (
    "a folder of torch.distributed.checkpoint, of fsdp-compile train (a step, or a run), a file of torch.save, "
    "a file of safetensors, or a folder of them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the three actions, each with its own arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser("info", help="print format, sizes, and every name with its shape and dtype")
    info.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=_PATH)
    info.add_argument("--json", action="store_true", help="print everything as one JSON list")
    verify = actions.add_parser("verify", help="read everything, and print the first problem with file and cause")
    verify.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=_PATH)
    verify.add_argument("--finite", action="store_true", help="infinite values and NaN are a problem as well")
    convert = actions.add_parser("convert", help="write the same values in another format, one tensor at a time")
    convert.add_argument("source", type=Path, metavar="SRC", help=_PATH)
    target = "a path that is free; of safetensors, one file if it ends so"
    convert.add_argument("target", type=Path, metavar="DST", help=target)
    convert.add_argument("--to", choices=["dcp", "torch", "safetensors"], required=True, help="the format of DST")
    convert.add_argument("--part", metavar="KEY", help="take this dictionary of the outermost one, such as model")
    convert.add_argument("--strip-prefix", default="", metavar="TEXT", help="remove it from names that begin with it")
    convert.add_argument("--prefix", default="", metavar="TEXT", help="put it before every name, after that")
    convert.add_argument("--dtype", choices=DTYPES, help="cast floating-point tensors (default: their own)")
    size = "1e9 bytes that a file of a folder of safetensors may have (default: 5)"
    convert.add_argument("--max-shard-gb", type=float, metavar="GB", help=size)
    others = "leave out what is no tensor, which safetensors cannot hold"
    convert.add_argument("--drop-others", action="store_true", help=others)
    for action in actions.choices.values():
        action.set_defaults(flags=[flag for each in action._actions for flag in each.option_strings])


def run(arguments: argparse.Namespace) -> int:
    """Does what the action says; returns 1 if a checkpoint is not what was written.

    Raises:
        ConfigError: If a path or an option has no meaning.
    """
    try:
        match arguments.action:
            case "info":
                return _info(arguments.paths, as_json=arguments.json)
            case "verify":
                return _verify(arguments.paths, require_finite=arguments.finite)
            case _:
                return _convert(arguments)
    except CheckpointError as error:
        _print_problem(error)
        return 1


def _info(paths: Sequence[Path], *, as_json: bool) -> int:
    folders = [folder for path in paths for folder in step_folders(path)]
    # Whatever is refused above is refused without importing torch.
    from fsdp_compile.formats.checkpoint import open_checkpoint

    found = [_described(open_checkpoint(folder)) for folder in folders]
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for described in found:
        untied = [tensor for tensor in described["tensors"] if tensor["tied_to"] is None]
        dtypes = dict.fromkeys(tensor["dtype"] for tensor in untied)
        sizes = [f"{_size(_bytes([t for t in untied if t['dtype'] == dtype]))} {dtype}" for dtype in dtypes]
        counts = f"{_count(described['tensors'], 'tensor')}, {_count(described['others'], 'other value')}"
        print(f"{described['path']}: {described['description']}")
        print(f"{counts}, {_size(described['bytes'])} ({', '.join(sizes)}), {_count(described['files'], 'file')}")
        if described["step"] is not None:
            print(f"steps that were done: {described['step']}")
        rows = list(_rows(described))
        names, shapes = (max((len(row[column]) for row in rows), default=0) for column in range(2))
        for name, shape, dtype in rows:
            print(_plain(f"{name:<{names}}  {shape:<{shapes}}  {dtype}"))
    return 0


def _rows(described: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, shape and dtype of each tensor, then the other values."""
    for tensor in described["tensors"]:
        tied = "" if tensor["tied_to"] is None else f", tied to {tensor['tied_to']}"
        yield tensor["name"], str(tensor["shape"]), tensor["dtype"] + tied
    for name in described["others"]:
        yield name, "", "no tensor"


def _verify(paths: Sequence[Path], *, require_finite: bool) -> int:
    folders = [folder for path in paths for folder in step_folders(path)]
    from fsdp_compile.formats.checkpoint import verify_checkpoint

    status = 0
    for path in folders:
        try:
            described = _described(verify_checkpoint(path, finite=require_finite))
        except CheckpointError as error:
            _print_problem(error)
            status = 1
            continue
        size = f"{_count(described['tensors'], 'tensor')}, {_size(described['bytes'])}"
        compared = "names and sizes" if described["format"] == "safetensors" else "checksums"
        digests = "" if described["step"] is None else "digests and "
        finite = ", all values finite" if require_finite else ""
        print(f"{path} is right: {size}, {digests}{compared}{finite}")
    return status


def step_folders(path: Path) -> list[Path]:
    """The steps in the folder of a run of `fsdp-compile train`, or of its checkpoints; for any other path, the path.

    Raises:
        ConfigError: There is no such path.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}", where="PATH", instead="a file or folder of a checkpoint")
    if not path.is_dir() or (path / ".metadata").exists():
        return [path]
    found = [*path.iterdir(), *path.glob("checkpoints/*")]
    steps = [each for each in found if _STEP.fullmatch(each.name) and each.is_dir()]
    return sorted(steps, key=lambda step: int(step.name.removeprefix("step-"))) or [path]


def _convert(arguments: argparse.Namespace) -> int:
    _check_convert(arguments)
    from fsdp_compile.formats.checkpoint import Format
    from fsdp_compile.formats.convert import ConvertOptions, convert_checkpoint

    options = ConvertOptions(
        to=Format(arguments.to),
        part=arguments.part,
        strip_prefix=arguments.strip_prefix,
        prefix=arguments.prefix,
        dtype=arguments.dtype,
        max_shard_gb=5.0 if arguments.max_shard_gb is None else arguments.max_shard_gb,
        drop_others=arguments.drop_others,
    )
    values, left_out = convert_checkpoint(arguments.source, arguments.target, options)
    tensors = _tensors(values)
    print(f"wrote {arguments.target}: {_count(tensors, 'tensor')}, {_size(_bytes(tensors))}")
    for name in left_out:
        print(_plain(f"left out: {name}"))
    return 0


def _check_convert(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be converted, as far as names and options tell."""
    source, target, to = arguments.source, arguments.target, arguments.to
    if not source.exists():
        raise ConfigError(f"there is no {source}", where="PATH", instead="a file or folder of a checkpoint")
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists", where="DST", instead="a name that is free")
    if not target.absolute().parent.is_dir():
        folder = target.absolute().parent
        raise ConfigError(f"{folder} is no folder", where="DST", instead="a path in a folder that exists")
    most = arguments.max_shard_gb
    if most is not None and not most > 0:
        raise ConfigError(f"files of {most} GB hold nothing", where="--max-shard-gb", instead="5")
    if most is not None and (to != "safetensors" or target.suffix == ".safetensors"):
        raise ConfigError(
            "only a folder of safetensors is divided into files of some size",
            where="--max-shard-gb",
            instead="--to safetensors and a DST that does not end in .safetensors, or leave it out",
        )
    if arguments.drop_others and to != "safetensors":
        raise ConfigError(f"{to} has a place for other values", where="--drop-others", instead="leave it out")


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `--json` prints of a checkpoint."""
    from fsdp_compile.formats.files import MARKER, read_marker

    path, tensors = checkpoint.path, _tensors(checkpoint.values)
    step = read_marker(path).step if (path / MARKER).exists() else None
    kind = {
        "dcp": f"{'a folder' if step is None else 'a step of fsdp-compile train'}, torch.distributed.checkpoint",
        "torch": "a file of torch.save",
        "safetensors": "a file of safetensors" if path.is_file() else "a folder of safetensors, Hugging Face",
    }
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return {
        "path": str(path),
        "format": checkpoint.format,
        "description": kind[checkpoint.format],
        "step": step,
        "files": [file.name for file in files],
        "bytes": _bytes(tensors),
        "tensors": tensors,
        "others": sorted(checkpoint.values.keys() - {tensor["name"] for tensor in tensors}),
    }


def _tensors(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    from torch import Tensor

    from fsdp_compile.formats.checkpoint import tied

    second = tied(values)
    return [
        {
            "name": name,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "bytes": value.nbytes,
            "tied_to": second.get(name),
        }
        for name, value in values.items()
        if isinstance(value, Tensor)
    ]


def _bytes(tensors: Sequence[dict[str, Any]]) -> int:
    """Those that are the same memory count once."""
    return sum(tensor["bytes"] for tensor in tensors if tensor["tied_to"] is None)


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}" if len(things) == 1 else f"{len(things)} {noun}s"


def _size(count: int) -> str:
    """Bytes in a unit of 1000s."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def _print_problem(error: CheckpointError) -> None:
    print(_plain(f"fsdp-compile checkpoint: {error}"), file=sys.stderr)


def _plain(text: str) -> str:
    """A text that does nothing to a terminal, whatever names a file has."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
