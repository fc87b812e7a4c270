"""Starts one process per rank, and ends them all when one fails."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

from fsdp_compile.comm.groups import start_world
from fsdp_compile.errors import ConfigError, FSDPCompileError, RankFailedError, UnsupportedModelError

_HEAD_START_S: Final = 1.0
"""By so much the rank that fails first ends before those that fail because of it."""


def run_on_ranks(
    fn: Callable[[Any], Any], argument: Any, world_size: int, *, device_type: str = "cpu", timeout_s: float
) -> Any:
    """Calls `fn(argument)`, both of which go through pickle, on every rank of a new world; returns rank 0's result.

    Raises:
        ConfigError: If the argument cannot be sent to another process, or a rank raised it.
        UnsupportedModelError: If a rank raised it.
        RankFailedError: If a rank died or raised anything else, with that rank's traceback.
    """
    try:
        call = pickle.dumps((fn, argument))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"a function or object cannot be sent to another process: {error}",
            where="check_parity",
            instead="functions that are defined at the top level of a module, or functools.partial of them: no lambdas",
        ) from error
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-") as folder:
        said = Path(folder)
        arguments = (call, said, world_size, device_type, timeout_s)
        ranks: Any = start_processes(_serve, arguments, world_size, join=False, daemon=True)
        try:
            while not ranks.join():
                pass
        except ProcessExitedException as end:
            raise _failure(said, end, world_size) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return pickle.loads((said / "0").read_bytes())


def _failure(said: Path, end: ProcessExitedException, world_size: int) -> FSDPCompileError:
    """The error of the rank that ended first."""
    rank = f"rank {end.error_index} of {world_size}"
    file = said / str(end.error_index)
    if not file.exists():
        how = f"ended with code {end.exit_code}" if end.signal_name is None else f"was ended by {end.signal_name}"
        return RankFailedError(
            f"{rank} {how}; the other ranks were ended",
            instead='if the script that calls this has no `if __name__ == "__main__":`, put the call below one',
        )
    error: FSDPCompileError | str = pickle.loads(file.read_bytes())
    return RankFailedError(f"{rank} failed, the other ranks were ended:\n{error}") if isinstance(error, str) else error


def _serve(rank: int, call: bytes, said: Path, world_size: int, device_type: str, timeout_s: float) -> None:
    """Runs one rank from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # sent by the system when the parent has died; at once, and silent
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    file = said / str(rank)
    try:
        fn, argument = pickle.loads(call)
        os.environ["LOCAL_RANK"] = str(rank)
        store = dist.FileStore(str(said / "store"), world_size)
        start_world(device_type, timedelta(seconds=timeout_s), store=store, rank=rank, world_size=world_size)
        file.write_bytes(pickle.dumps(fn(argument)))
        dist.barrier()  # no rank leaves while another still needs it
    except BaseException as error:
        file.write_bytes(pickle.dumps(_described(error)))
        time.sleep(_HEAD_START_S)  # so that those which this one makes fail are not taken for the first
        os._exit(1)  # without waiting for threads of collectives that will never end
    dist.destroy_process_group()


def _described(error: BaseException) -> FSDPCompileError | str:
    """An error that is the user's, or the traceback of any other."""
    if isinstance(error, ConfigError | UnsupportedModelError):
        return error
    if isinstance(error, AttributeError) and str(error).startswith("Can't get attribute"):
        # A function of an interactive session is known to this process by a name that leads nowhere.
        what = f"a function cannot be imported in another process: {error}"
        return ConfigError(what, where="check_parity", instead="functions of a module, or of a script that is a file")
    return traceback.format_exc()
