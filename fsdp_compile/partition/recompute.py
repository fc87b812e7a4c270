"""Recomputes activations block by block in backward, where a budget of memory does not hold them.

    forward    | block 0 | block 1 | ... | block n |  loss
               ^         ^         ^     ^         only what crosses from one block to a later one is saved
    backward   | ... | block 1 again, its gradients | block 0 again, its gradients |

A block is what lies between reads of one unit and of the next one, cut where the fewest bytes are live. The first
blocks are recomputed first: their backward runs last, when the activations of the others are freed, so that what they
compute again has room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import getitem
from typing import TypeVar

from torch import fx

from fsdp_compile._torch.dynamo import CheckpointPolicy
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.errors import BudgetTooSmallError
from fsdp_compile.ir.graph import record_of
from fsdp_compile.ir.queries import READS, is_alias, is_known_to_repeat, parameter_only
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP

T = TypeVar("T")
Block = tuple[fx.Node, ...]
_COMMUNICATE = ("_c10d_functional", "_dtensor")
_EXCHANGE_ROWS = (LOOK_UP, AVERAGE_ROWS)


def blocks(joint: fx.Graph) -> list[Block]:
    """What can be recomputed of a joint graph, in the order of forward; none where the program checkpoints by itself.

    What follows the last unit's block (the loss) is no block: it would be computed again at once.
    """
    nodes = _forward(joint)
    if any("recompute" in node.meta for node in nodes):
        return []
    records = {at: record_of(node.all_input_nodes[0]) for at, node in enumerate(nodes) if node.target in READS}
    reads = [(at, record.unit) for at, record in records.items() if record is not None]
    changes = [(first, then) for (first, unit), (then, other) in itertools.pairwise(reads) if unit != other]
    live = _live_bytes(nodes)
    cuts = {min(range(first + 1, then + 1), key=lambda place: (live[place], -place)) for first, then in changes}
    return [tuple(nodes[begin:end]) for begin, end in itertools.pairwise([0, *sorted(cuts)])]


def recompute(chosen: Sequence[Block]) -> None:
    """Marks blocks so that backward computes them again from what crosses into them."""
    for number, block in enumerate(chosen):
        inside = frozenset(block)
        for node in filter(_can_run_twice, block):
            is_read_later = any(user not in inside and not _is_of_backward(user) for user in node.users)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if is_read_later else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = number


def with_fewest(attempt: Callable[[int], T], count: Callable[[], int]) -> T:
    """What an attempt makes with as few recomputed blocks as its budget allows.

    Args:
        attempt: Called with a number of blocks, last with the chosen one; raises `BudgetTooSmallError`.
        count: How many blocks there are; asked only if they are needed.

    Raises:
        BudgetTooSmallError: If no number of blocks is enough; of the attempts, that which needs the least.
    """
    try:
        return attempt(0)
    except BudgetTooSmallError as error:
        refused = error
    fits, refused_at = count(), 0
    if not fits:
        raise refused
    try:
        made = attempt(fits)
    except BudgetTooSmallError as error:
        raise min(refused, error, key=lambda each: each.least_bytes) from None
    last = fits
    while fits - refused_at > 1:
        last = (fits + refused_at) // 2
        try:
            made, fits = attempt(last), last
        except BudgetTooSmallError:
            refused_at = last
    return made if last == fits else attempt(fits)


def _forward(joint: fx.Graph) -> list[fx.Node]:
    """The calls of forward, without what is computed from parameters alone, which is read again anyway."""
    apart = frozenset(parameter_only(joint))
    calls = [node for node in joint.nodes if node.op == "call_function"]
    reads = [node for node in calls if node.target in READS]
    kept = (n for n in calls if not _is_of_backward(n) and (n not in apart or n in reads))
    tangents = {node for node in joint.find_nodes(op="placeholder") if node.name.startswith("tangents")}
    return list(itertools.takewhile(lambda node: tangents.isdisjoint(node.all_input_nodes), kept))


def _is_of_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"  # AOTAutograd's own tag


def _live_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Bytes that calls before each call have computed, and that it or a later one reads."""
    place = {node: at for at, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in nodes:
        root = node
        while is_alias(root) or (root.target is getitem and root.all_input_nodes):
            root = root.all_input_nodes[0]
        if root in place and root.target not in READS:
            ends = [place[user] for user in node.users if user in place]
            last[root] = max([last.get(root, 0), *ends])
    live = [0] * (len(nodes) + 1)
    for node, end in last.items():
        for at in range(place[node] + 1, end + 1):
            live[at] += result_bytes(node)
    return live


def _can_run_twice(node: fx.Node) -> bool:
    """Whether a call gives the same again, and nobody notices: no random numbers, no writes, no communication."""
    if node.target in READS:
        return False  # marked as all reads are
    if node.target is getitem:
        return _can_run_twice(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or node.is_impure() or node.target in _EXCHANGE_ROWS:
        return False
    repeats = is_known_to_repeat(node.target)
    return repeats and not (node.target._schema.is_mutable or node.target.namespace in _COMMUNICATE)
