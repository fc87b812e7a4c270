"""What a plan is made for where nobody says: chosen by what every rank of a job has in common."""

from __future__ import annotations

import torch

from fsdp_compile.cost.hardware import DEVICES, Hardware, hardware
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.record import Role, require


def hardware_of(step: StepGraph) -> Hardware:
    """Device and link that the graph of a step will run on.

    All ranks must come to the same answer, or their schedules differ: it depends on the type of the device, on its
    name, and on whether a group fits into one machine.
    """
    flats = list(step.nodes(Role.FLAT))
    if not flats or (require(flats[0]).specs[0].compute or flats[0].meta["val"].device.type) != "cuda":
        return hardware("cpu", "ethernet-10")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = next((key for key in DEVICES if key.split("-")[0].upper() in name.upper()), "h100-sxm")
    together = require(flats[0]).specs[0].size <= torch.cuda.device_count()
    link = "nvlink3" if known.startswith("a100") else "nvlink4"
    return hardware(known, link if together else "ib-400")
