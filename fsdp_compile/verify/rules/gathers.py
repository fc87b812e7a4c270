"""gathered-once: one all-gather per parameter and graph, and every reader gets that parameter's own elements."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import fx

from fsdp_compile.ir.graph import Role, record_of, require, role_of
from fsdp_compile.ops.quantize import BLOCK_SCALES, DEQUANTIZE, QUANTIZE
from fsdp_compile.verify.facts import Collective, Facts, Kind, dtype_of, shape_of
from fsdp_compile.verify.report import Finding
from fsdp_compile.verify.trace_elements import (
    WIRES,
    Origin,
    Probe,
    Slot,
    all_slots,
    linear_size,
    origin,
    probes,
    slots_of,
)

_IN_MEMORY = (Role.SAVED_PARAM, Role.UNSHARDED_PARAM)


def gathered_once(facts: Facts) -> Iterator[Finding]:
    """Checks what each all-gather sends, and where each full parameter comes from."""
    slots = all_slots(facts)
    gathered = {
        (slot.flat, slot.spec.offset): saved
        for saved in facts.of_role(*_IN_MEMORY)
        for key in require(saved).claims
        for slot in slots.get(key, ())
    }
    for gather in facts.of_kind(Kind.GATHER):
        for message in gather.sent:
            for slot in slots_in(message, slots):
                key = (slot.flat, slot.spec.offset)
                if key in gathered:
                    first = gathered[key]
                    verb = "holds" if role_of(first) in _IN_MEMORY else "gathers"
                    hint = "let all readers of one graph share one all-gather, or what forward kept"
                    yield gather.start, f"gathers {slot.name}, which %{first} {verb} already", hint
                gathered[key] = gather.start
                yield from _wrong_collective(gather, message, slot)
    for node in facts.of_role(Role.FULL):
        yield from _wrong_value(node, slots)
    for node in facts.of_role(Role.LOOK_UP):
        wanted = [(slot.flat, slot.spec.text) for key in require(node).claims for slot in slots.get(key, ())]
        if (node.args[0], node.args[2]) not in wanted:
            what = f"looks up another slot than that of {', '.join(require(node).parameters)}"
            yield node, what, "the flat parameter and the place that the record of the lookup names"


def slots_in(message: fx.Node, slots: dict[tuple[str, str], list[Slot]]) -> list[Slot]:
    """Slots of which a message has at least a part."""
    if role_of(message) is Role.POST_FORWARD_SHARD:
        return [s for key in require(message).claims for s in slots.get(key, ()) if s.spec in require(message).specs]
    if message.target is torch.ops.aten.cat.default:
        return [slot for part in message.all_input_nodes for slot in slots_in(part, slots)]
    numel = prod(shape_of(message))
    if numel == 0 or message.target is BLOCK_SCALES:  # scales have no elements: see `_wrong_scale`
        return []
    first, last = origin(message, 0, 0), origin(message, numel - 1, 0)
    if first.node is None or first.node is not last.node or role_of(first.node) is not Role.FLAT:
        return []
    return [
        slot
        for slot in slots_of(first.node)
        if slot.spec.offset <= last.index and first.index < slot.spec.offset + slot.spec.extent
    ]


def _wrong_collective(gather: Collective, message: fx.Node, slot: Slot) -> Iterator[Finding]:
    spec = slot.spec
    is_part = role_of(message) is Role.POST_FORWARD_SHARD
    size, group = (spec.post_forward_size, spec.post_forward_group) if is_part else (spec.size, spec.group)
    dtype = spec.param_dtype if is_part else spec.wire_dtype
    if (gather.group, gather.size, dtype_of(message)) != (group, size, dtype):
        what = f"gathers {slot.name} as {dtype_of(message)} over {gather.size} ranks of {gather.group!r}"
        yield gather.start, what, f"its read wants {dtype} over {size} ranks of {group!r}"
    sent = message.args[2] if message.target is QUANTIZE else ""
    if sent != spec.gather_format and not is_part:
        yield gather.start, f"sends {slot.name} as {sent or 'it is'}", f"its read wants {spec.gather_format or dtype}"


def _wrong_value(node: fx.Node, slots: dict[tuple[str, str], list[Slot]]) -> Iterator[Finding]:
    record = require(node)
    spec = record.specs[0]
    candidates = [slot for key in record.claims for slot in slots.get(key, ()) if slot.spec == spec]
    if len(record.specs) != 1 or not candidates:
        what = f"is recorded as {', '.join(record.parameters)}, which is in no flat parameter of this graph"
        yield node, what, "a full parameter's record names the one parameter that it is, and its place in a graph input"
    elif (shape_of(node), dtype_of(node)) != (spec.shape, spec.param_dtype):
        what = f"is recorded as {record.parameters[0]} but has another type"
        yield node, what, f"{spec.param_dtype} of shape {list(spec.shape)}"
    else:
        wrong = [_wrong_element(node, slot) for slot in candidates]
        if all(wrong):
            place = f"[{spec.offset}, {spec.offset + spec.extent}) of each rank's flat parameter"
            hint = f"its slot is {place}, over {spec.size} ranks of {spec.group!r}"
            yield node, f"is not {record.parameters[0]}: {wrong[0]}", hint


def _is_saved(found: Origin, slot: Slot) -> bool:
    """Whether an element comes from the full parameter of a slot that is unsharded since an earlier call."""
    record = None if found.node is None else record_of(found.node)
    if record is None or record.role is not Role.UNSHARDED_PARAM:
        return False
    return (record.unit, *record.parameters) == (require(slot.flat).unit, slot.name)


def _wrong_element(node: fx.Node, slot: Slot) -> str:
    """What is wrong with the first element that comes from elsewhere; empty if none does."""
    for probe in probes(slot.spec):
        found = origin(node, probe.element, 0)
        if _is_saved(found, slot):
            if found.index != probe.element or found.hops:
                return f"element {probe.element} is [{found.index}] of the full parameter %{found.node}"
            continue
        # Reductions have no single sending rank; a wrong one is counted in `hops` all the same.
        ranks = [hop.rank for hop in found.hops if hop.collective.kind is Kind.GATHER]
        if found.node is not None and role_of(found.node) is Role.POST_FORWARD_SHARD:
            wrong = _wrong_part(found, slot, probe, ranks)
        else:
            wrong = _wrong_source(node, slot, probe, found, ranks)
        if wrong:
            return f"element {probe.element} {wrong}"
    return ""


def _wrong_source(node: fx.Node, slot: Slot, probe: Probe, found: Origin, ranks: list[int | None]) -> str:
    """What is wrong with an element that was gathered from the flat parameters."""
    wire = WIRES.get(slot.spec.gather_format)
    # Of elements that share a byte only the first is traced; slots begin with a byte.
    place = probe.place - (probe.place % wire.per_byte if wire else 0)
    if (found.node, found.index) != (slot.flat, place):
        return f"is [{found.index}] of %{found.node}, not [{place}] of %{slot.flat}"
    if len(found.hops) != (slot.spec.size > 1) or len(ranks) != len(found.hops):
        return f"went through {len(found.hops)} collectives"
    if ranks and slot.spec.dim is not None and ranks != [probe.rank]:
        return f"is rank {ranks[0]}'s, not rank {probe.rank}'s"
    return _wrong_scale(node, slot, probe) if slot.spec.gather_format else ""


def _wrong_scale(node: fx.Node, slot: Slot, probe: Probe) -> str:
    """What is wrong with how a quantized element is read, or with its scale; empty if nothing is."""
    while node.target is not DEQUANTIZE:
        if not node.all_input_nodes or role_of(node) not in (Role.FULL, Role.COPY_OUT):
            return "is not dequantized"
        node = node.all_input_nodes[0]
    scales: fx.Node = node.args[1]  # type: ignore[assignment]
    spec, wire = slot.spec, WIRES[slot.spec.gather_format]
    if tuple(node.args[2:]) != (spec.gather_format, spec.size, spec.param_dtype):
        return f"is read as {node.args[2:]}, not as {(spec.gather_format, spec.size, spec.param_dtype)}"
    block = (probe.place - spec.offset) // wire.block
    found = origin(scales, probe.rank * (linear_size(scales) // spec.size) + block * wire.scale_bytes, 0)
    if (found.node, found.index) != (slot.flat, spec.offset + block * wire.block):
        return f"has the scale of [{found.index}] of %{found.node}, not of block {block} of %{slot.flat}"
    if [hop.rank for hop in found.hops] != [probe.rank]:
        return f"has the scale of ranks {[hop.rank for hop in found.hops]}, not of rank {probe.rank}"
    return ""


def _wrong_part(found: Origin, slot: Slot, probe: Probe, ranks: list[int | None]) -> str:
    """What is wrong with an element that was gathered from the post-forward shards."""
    spec = slot.spec
    wanted = divmod(probe.rank * spec.extent + probe.place - spec.offset, max(spec.post_forward_numel, 1))
    if slot.name not in require(found.last if found.node is None else found.node).parameters:
        return f"is of a part of another parameter, %{found.node}"
    if (ranks, found.index) != ([wanted[0]], wanted[1]):
        return f"is [{found.index}] of part {ranks}, not [{wanted[1]}] of part {wanted[0]}"
    return ""
