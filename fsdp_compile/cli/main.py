"""`fsdp-compile COMMAND ...`: finds the command and turns errors of the user's into one message.

A command is a module of this folder with `NAME`, `ABOUT`, `add_arguments(parser)` and `run(arguments)`, which returns
the exit status.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import fsdp_compile
from fsdp_compile.cli import calibrate, checkpoint, explain, opt, parity, plan, train
from fsdp_compile.errors import ConfigError, FSDPCompileError, UnsupportedModelError

COMMANDS: Final[tuple[ModuleType, ...]] = (train, checkpoint, explain, plan, calibrate, parity, opt)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; without `argv`, with the arguments of this process.

    Returns:
        Exit status: 0 done, 1 failed, 2 wrong use, 128 + n ended by signal n.
    """
    arguments, unknown = make_parser().parse_known_args(argv)
    try:
        if unknown:
            raise _unknown_argument(unknown[0], arguments)
        status: int = arguments.run(arguments)
    except (ConfigError, UnsupportedModelError) as error:
        # Below a launcher every rank finds the same mistake; one rank of each host reports it, as files differ by host.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"fsdp-compile {arguments.command}: {_by_flag(error, arguments.flags)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Fully sharded data parallel for torch.compile.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.ABOUT, description=command.ABOUT)
        command.add_arguments(sub)
        flags = [flag for action in sub._actions for flag in action.option_strings]
        sub.set_defaults(run=command.run, flags=flags)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: a tree that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{parser.prog} {fsdp_compile.__version__}")
        parser.exit()


def _unknown_argument(argument: str, arguments: argparse.Namespace) -> ConfigError:
    name = argument.split("=", maxsplit=1)[0]
    # Without the dashes, which all have in common.
    near = difflib.get_close_matches(name.strip("-"), [flag.strip("-") for flag in arguments.flags], n=1)
    instead = f"--{near[0]}" if near else f"see {arguments.command} --help"
    return ConfigError(f"unknown argument {name}", instead=instead)


def _by_flag(error: FSDPCompileError, flags: Sequence[str]) -> FSDPCompileError:
    """An error that names a flag where it named the argument or option that has been given by it."""
    argument = re.search(r"[({]'?(\w+)'?[=:]", error.where or "")
    flag = "" if argument is None else f"--{argument[1].replace('_', '-')}"
    return FSDPCompileError(error.what, where=flag if flag in flags else error.where, instead=error.instead)
