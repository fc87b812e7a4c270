"""`fsdp-compile COMMAND ...`: finds the command and turns errors of the user's into one message."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from fsdp_compile.cli import bench, calibrate, checkpoint, explain, opt, parity, train
from fsdp_compile.errors import ConfigError, UnsupportedModelError


class Command(Protocol):
    """A module of this folder that is a command."""

    NAME: str
    ABOUT: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it, and return the exit status."""


COMMANDS: Final[tuple[Command, ...]] = (train, checkpoint, explain, calibrate, parity, bench, opt)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; without `argv`, with the arguments of this process.

    Returns:
        Exit status: 0 done, 1 failed, 2 wrong use, 128 + n ended by signal n.
    """
    arguments, unknown = make_parser().parse_known_args(argv)
    try:
        if unknown:
            raise _unknown_argument(unknown[0], arguments)
        return arguments.run(arguments)
    except (ConfigError, UnsupportedModelError) as error:
        # Below a launcher every rank finds the same mistake; one rank of each host reports it, as files differ by host.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"fsdp-compile {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Fully sharded data parallel for torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.ABOUT, description=command.ABOUT)
        command.add_arguments(sub)
        # For `_unknown_argument`, which suggests the most similar one.
        flags = [flag for action in sub._actions for flag in action.option_strings]
        sub.set_defaults(run=command.run, flags=flags)
    return parser


def _unknown_argument(argument: str, arguments: argparse.Namespace) -> ConfigError:
    name = argument.split("=", maxsplit=1)[0]
    near = difflib.get_close_matches(name, arguments.flags, n=1)
    return ConfigError(f"unknown argument {name}", instead=near[0] if near else f"see {arguments.command} --help")
