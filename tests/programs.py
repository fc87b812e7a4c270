"""Programs that torchrun would start, run by ranks of the pool: they need not import torch, which takes seconds."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from tests.ranks import close_pool, run_ranks


def run_program(program: str, folder: Path, *arguments: str, ranks: int = 2, **environment: str) -> str:
    """What the first rank prints.

    Args:
        program: Path of a script, or name of a module.
        folder: Where it runs.
        arguments: Of its command line.
        ranks: How many run it.
        environment: Variables, beside those of torchrun.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        return run_ranks(_run, program, str(folder), arguments, port, environment, world_size=ranks)[0]
    finally:
        close_pool()  # others do not find what a program and its libraries leave behind


def _run(program: str, folder: str, arguments: tuple[str, ...], port: int, environment: dict[str, str]) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # gloo fails on a rank that still connects to one that is gone
    dist.destroy_process_group()  # the program makes its own
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in names.items()}, **environment}
    sys.argv[1:] = arguments
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    return printed.getvalue()
