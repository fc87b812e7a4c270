"""`fsdp-compile checkpoint`: what is in a checkpoint, whether it is right, and the same in another format."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fsdp_compile.config.choices import DTYPES
from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.options import SHARD_GB, ConvertOptions, Format, Others, check_convert, check_exists

if TYPE_CHECKING:
    from fsdp_compile.formats.entries import Checkpoint

NAME = "checkpoint"
ABOUT = "Show, verify and convert checkpoints of any format; needs no model and no ranks, and executes nothing in them."

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
    _add_convert(actions.add_parser("convert", help="write the same values in another format, one tensor at a time"))
    for action in actions.choices.values():
        flags = [flag for each in action._actions for flag in each.option_strings]
        action.set_defaults(flags=flags)


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("source", type=Path, metavar="SRC", help=_PATH)
    convert.add_argument(
        "target", type=Path, metavar="DST", help="a path that is free; of safetensors, one file if it ends so"
    )
    convert.add_argument("--to", choices=[each.value for each in Format], required=True, help="the format of DST")
    convert.add_argument("--part", metavar="KEY", help="take this dictionary of the outermost one, such as model")
    convert.add_argument("--strip-prefix", default="", metavar="TEXT", help="remove it from names that begin with it")
    convert.add_argument("--prefix", default="", metavar="TEXT", help="put it before every name, after that")
    convert.add_argument("--dtype", choices=DTYPES, help="cast floating-point tensors (default: their own)")
    convert.add_argument(
        "--max-shard-gb",
        type=float,
        metavar="GB",
        help=f"1e9 bytes that a file of a folder of safetensors may have (default: {SHARD_GB:g})",
    )
    convert.add_argument(
        "--drop-others",
        action="store_const",
        const=Others.DROP,
        default=Others.REFUSE,
        help="leave out what is no tensor, which safetensors cannot hold",
    )


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
    for path in paths:
        check_exists(path)
    # Whatever is refused above is refused without importing torch.
    from fsdp_compile.formats.detect import open_checkpoint, step_folders

    found = [open_checkpoint(each) for path in paths for each in step_folders(path)]
    if as_json:
        print(json.dumps([_described(checkpoint) for checkpoint in found], indent=2))
        return 0
    for checkpoint in found:
        _show(checkpoint)
    return 0


def _verify(paths: Sequence[Path], *, require_finite: bool) -> int:
    for path in paths:
        check_exists(path)
    from fsdp_compile.formats.detect import step_folders
    from fsdp_compile.formats.entries import nbytes, tensors
    from fsdp_compile.formats.verify import Finite, verify_checkpoint

    status = 0
    for path in [folder for each in paths for folder in step_folders(each)]:
        try:
            verified = verify_checkpoint(path, Finite.REQUIRE if require_finite else Finite.IGNORE)
        except CheckpointError as error:
            _print_problem(error)
            status = 1
            continue
        entries = verified.checkpoint.entries
        size = f"{_count(list(tensors(entries)), 'tensor')}, {_size(nbytes(entries))}"
        finite = ", all values finite" if require_finite else ""
        print(f"{path} is right: {size}, {verified.compared}{finite}")
    return status


def _convert(arguments: argparse.Namespace) -> int:
    options = ConvertOptions(
        to=Format(arguments.to),
        part=arguments.part,
        strip_prefix=arguments.strip_prefix,
        prefix=arguments.prefix,
        dtype=arguments.dtype,
        max_shard_gb=arguments.max_shard_gb,
        others=arguments.drop_others,
    )
    check_convert(arguments.source, arguments.target, options)
    from fsdp_compile.formats.convert import convert_checkpoint
    from fsdp_compile.formats.entries import nbytes, tensors

    done = convert_checkpoint(arguments.source, arguments.target, options)
    print(f"wrote {done.path}: {_count(list(tensors(done.entries)), 'tensor')}, {_size(nbytes(done.entries))}")
    for name in done.left_out:
        print(_plain(f"left out: {name}"))
    return 0


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `--json` prints of a checkpoint."""
    from fsdp_compile.formats.entries import nbytes, others, tensors

    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "description": checkpoint.description,
        "writers": checkpoint.writers,
        "step": checkpoint.step,
        "files": [path.name for path in checkpoint.files()],
        "bytes": nbytes(checkpoint.entries),
        "tensors": [
            {
                "name": entry.name,
                "shape": list(info.shape),
                "dtype": str(info.dtype).removeprefix("torch."),
                "bytes": info.nbytes,
                "tied_to": entry.tied_to,
            }
            for entry, info in tensors(checkpoint.entries)
        ],
        "others": others(checkpoint.entries),
    }


def _show(checkpoint: Checkpoint) -> None:
    described = _described(checkpoint)
    rows = [(_plain(t["name"]), str(t["shape"]), _plain(_dtype(t))) for t in described["tensors"]]
    rows += [(_plain(name), "", "no tensor") for name in described["others"]]
    summary = _summary(described)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table("name", "shape", "dtype", title=summary, title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, markup=False).print(table)
        return
    print(summary)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for name, shape, dtype in rows:
        print(f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype}")


def _summary(described: dict[str, Any]) -> str:
    """One paragraph about a checkpoint."""
    sizes: dict[str, int] = {}
    for each in described["tensors"]:
        if each["tied_to"] is None:
            sizes[each["dtype"]] = sizes.get(each["dtype"], 0) + each["bytes"]
    each_size = ", ".join(f"{_size(count)} {dtype}" for dtype, count in sizes.items())
    counts = f"{_count(described['tensors'], 'tensor')}, {_count(described['others'], 'other value')}"
    known = [
        f"{described['path']}: {described['description']}",
        f"{counts}, {_size(described['bytes'])} ({each_size}), {_count(described['files'], 'file')}",
    ]
    if described["writers"] is not None:
        known.append(f"ranks that wrote values: {described['writers']}")
    if described["step"] is not None:
        known.append(f"steps that were done: {described['step']}")
    return "\n".join(known)


def _dtype(tensor: dict[str, Any]) -> str:
    return tensor["dtype"] if tensor["tied_to"] is None else f"{tensor['dtype']}, tied to {tensor['tied_to']}"


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
