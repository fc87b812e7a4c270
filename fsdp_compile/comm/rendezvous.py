"""How the ranks of a group compare texts through the store of the world, and learn of each other's failures.

Under a prefix that no other group uses, in this world or in a later one of the same store:

    failed              what went wrong, in this group or in another one of a rank of this group: ends all waiting here
    <n>/digest, text    the first rank's text in round n; a rank with another digest takes it
    <n>/here/<rank>     set by each rank when it begins round n
    <n>/refused         why a rank compiles nothing in round n: ends this round alone, since ranks may try again
    <n>/end/here/<rank>, arrived, all    the ranks that are done with the text, how many, and set when all are
    <n>/end/left        how many have gone on; the last one deletes the round's keys
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator

from fsdp_compile.comm.failures import AnsweringStore, failed_elsewhere, pauses
from fsdp_compile.errors import FSDPCompileError, RankFailedError, RankMismatchError

_KINDS: dict[str, type[FSDPCompileError]] = {kind.__name__: kind for kind in (RankFailedError, RankMismatchError)}


class RefusedElsewhereError(RankFailedError):
    """A rank, by its number in the world, has refused what the others compile, as keys of the group `heard_in` say.

    `reason` are the arguments of its error.
    """

    def __init__(self, rank: int, reason: dict[str, str | None], heard_in: str) -> None:
        self.rank = rank
        self.reason = reason
        self.heard_in = heard_in
        what = f"rank {rank} refused to compile: {reason['what']}"
        super().__init__(what, where=reason["where"], instead=reason["instead"])


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet.

    Attributes:
        store: With a prefix of the group's own.
        name: That prefix.
        ranks: The group's ranks, by their numbers in the world.
        rank: The number of this one in the group.
        timeout_s: How long to wait for others in a round.
        world: The store in which a rank leaves the error that ends it, if there is one.
        wanted: What the ranks wait for each other to do.
    """

    store: AnsweringStore
    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    world: AnsweringStore | None = None
    wanted: str = "compile its next collectives"

    def first(self, number: int, digest: str, text: str) -> str | None:
        """Begins a round, whose number is the same on all ranks: each compares its digest with that of the first rank.

        Returns:
            `None` if both are the same, else the first rank's text.

        Raises:
            RefusedElsewhereError: If a rank has refused to compile what this round compares.
            RankFailedError: If a rank does not come in time, or the store fails.
            FSDPCompileError: What ended another group of one of the ranks.
        """
        at = f"{number}/"
        with self._answered():
            self._enter(at)
            if self.rank == 0:
                self.store.set(f"{at}text", text)
                self.store.set(f"{at}digest", digest)
                return None
            self._wait(number, at, "digest")
            return None if self.store.get(f"{at}digest").decode() == digest else self.store.get(f"{at}text").decode()

    def meet(self, number: int) -> None:
        """Ends a round, or is one without a text: no rank returns before all have come; raises as `first`."""
        at = f"{number}/end/"
        with self._answered():
            self._enter(at)
            if self.store.add(f"{at}arrived", 1) == len(self.ranks):
                self.store.set(f"{at}all", "")
            self._wait(number, at, "all")
            for key in (f"{number}/here/{self.rank}", f"{at}here/{self.rank}"):
                self.store.delete_key(key)
            if self.store.add(f"{at}left", 1) == len(self.ranks):
                for key in ("digest", "text", "end/arrived", "end/all", "end/left"):
                    self.store.delete_key(f"{number}/{key}")

    def tell(self, error: FSDPCompileError) -> None:
        """Ends all waiting of the group, now and later, with an error of this or another group; the first one stays."""
        with contextlib.suppress(RuntimeError):
            # If the store fails, the error that is being told says more than that of the store.
            if not self.store.check(["failed"]):
                kind = type(error) if type(error) in _KINDS.values() else RankFailedError
                self.store.set("failed", json.dumps({"kind": kind.__name__, **_parts(error)}))

    def refuse(self, number: int, error: FSDPCompileError) -> None:
        """Ends one round, which this rank would have taken part in: its ranks, now or later, get the reason."""
        rank, reason = self.ranks[self.rank], _parts(error)
        if isinstance(error, RefusedElsewhereError):
            rank, reason = error.rank, error.reason
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{number}/refused", json.dumps({"rank": rank, "reason": reason}))

    @property
    def _where(self) -> str:
        return f"rank {self.ranks[self.rank]}, which waited for all ranks to {self.wanted}"

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except FSDPCompileError:
            raise
        except RuntimeError as error:  # torch's errors of stores
            raise RankFailedError(
                f"the store through which ranks meet does not answer: {error}",
                where=self._where,
                instead="find out why the process that holds the store has ended (rank 0 or the launcher)",
            ) from error

    def _enter(self, at: str) -> None:
        self._refuse_failed()
        self.store.set(f"{at}here/{self.rank}", "")

    def _wait(self, number: int, at: str, key: str) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        pause_s = pauses(len(self.ranks))
        # Polling, not the blocking `store.wait`: a failure or a refusal of another rank must end the wait.
        while not self.store.check([at + key]):
            self._refuse_failed()
            if self.store.check([f"{number}/refused"]):
                raise RefusedElsewhereError(**json.loads(self.store.get(f"{number}/refused")), heard_in=self.name)
            if time.monotonic() > deadline_s:
                raise self._timed_out(at)
            time.sleep(next(pause_s))

    def _refuse_failed(self) -> None:
        if self.world is not None:
            error = failed_elsewhere(self.world, self._where)
            if error is not None:
                raise error
        if self.store.check(["failed"]):
            parts = json.loads(self.store.get("failed"))
            raise _KINDS[parts.pop("kind")](parts.pop("what"), **parts)

    def _timed_out(self, at: str) -> RankFailedError:
        keys = {f"{at}here/{number}": rank for number, rank in enumerate(self.ranks)}
        named = ", ".join(str(keys[key]) for key in self.store.missing(list(keys)))
        return RankFailedError(
            f"rank {named} did not {self.wanted} within {self.timeout_s:g} s",
            where=f"rank {self.ranks[self.rank]} is there, and waits for ranks {self.ranks}",
            instead="see on that rank whether it died, is stuck, or does not run a module that this one runs: what is "
            "done inside of `if rank == 0:` (an evaluation, say) has to be done on every rank, and a module that has "
            "no rows on one rank has to be called there all the same, with an empty tensor; if this rank has compiled "
            "for a batch of another size (with memory_budget_gb, reshard_after_forward='auto' or lists of modules "
            "to prefetch), options={'prefetch': 1} makes no plan that depends on it",
        )


def _parts(error: FSDPCompileError) -> dict[str, str | None]:
    return {"what": error.what, "where": error.where, "instead": error.instead}


def digest_of(text: str) -> str:
    """A short text that stands for a long one."""
    return hashlib.sha256(text.encode()).hexdigest()
