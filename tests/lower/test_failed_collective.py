"""A collective that fails in a compiled graph is named: whose parameters a rank has waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import RankFailedError
from fsdp_compile.comm import failures
from tests.models.kinds import WIDTH, Slim
from tests.ranks import run_ranks


def _left_alone(options: dict[str, Any]) -> str:
    """Rank 1 ends after a step; rank 0 begins another one."""
    compiled = torch.compile(Slim(), backend="fsdp", options={"bucket_mb": 0, "prefetch": "none", **options})
    compiled(torch.ones(2, WIDTH)).sum().backward()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_ANSWER_S", 0.3)
        with pytest.raises(RankFailedError) as caught:
            compiled(torch.ones(2, WIDTH))
    return str(caught.value.where)


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.inductor])])
def test_the_collective_is_named(lower: str) -> None:
    said, _ = run_ranks(_left_alone, {"lower": lower}, timeout_s=100)
    assert said.startswith("rank 0, waiting for the all-gather of blocks.0.0.")
    assert " in a compiled forward of unit blocks.0" in said
