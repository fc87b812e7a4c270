"""`check_parity` and `fsdp-compile parity` on processes of their own: what is shown, raised and returned."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import ConfigError, ParityError, RankFailedError, check_parity
from fsdp_compile.cli.main import main
from fsdp_compile.parity import api
from tests.parity.cases import (
    PLANTED,
    PLANTED_PASS,
    dies_on_one_rank,
    make_batch,
    make_model,
    make_model_with_planted_bug,
    odd_batch,
    passes_with_fault,
    raises_on_one_rank,
    shard,
)

HERE = "tests.parity.cases"


@pytest.mark.long
@pytest.mark.core
def test_the_command_prints_the_table_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "Largest differences" in out
    assert "optimizer state      180       0" in out
    assert out.endswith("equal in every bit: 306 tensors over 2 steps\n")


@pytest.mark.long
@pytest.mark.inductor
def test_the_command_holds_inductor_to_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["parity", f"{HERE}:make_model", "--level", "tolerance", "--reference", "single", "--steps", "2", "--json"]
    assert main([*argv, "--param-dtype", "bfloat16", "--reduce-dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert "lower=inductor" in report["title"]
    judged = [d for d in report["differences"] if d["bound"] is not None]
    assert {d["quantity"] for d in judged} == {"loss", "gradient", "parameter", "optimizer state"}
    assert all(d["absolute"] <= d["bound"] for d in judged)
    assert any(d["different"] for d in judged)  # rounded otherwise than eager


@pytest.fixture(scope="module")
def planted() -> ParityError:
    """What a bisected comparison raises for a planted bug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "passes", passes_with_fault)  # as in the ranks
        with pytest.raises(ParityError) as raised:
            check_parity(make_model_with_planted_bug, make_batch, steps=1, world_size=2, bisect=True)
    return raised.value


@pytest.mark.long
def test_the_command_exits_1_and_names_the_parameter_of_a_planted_bug(
    planted: ParityError, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "measure", lambda _: planted.report)  # found by ranks, once for both tests
    argv = ["parity", f"{HERE}:make_model_with_planted_bug", "--steps", "1", "--json"]
    assert main(argv) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["equal"]
    assert (report["first"]["quantity"], report["first"]["name"], report["first"]["step"]) == ("gradient", PLANTED, 0)
    assert report["first"]["relative"] == pytest.approx(2.0**-10, rel=0.01)


@pytest.mark.long
def test_bisection_names_the_pass_that_a_difference_comes_from(planted: ParityError) -> None:
    assert f"gradient of {PLANTED} at step 0" in str(planted)
    assert planted.report.introduced_by == PLANTED_PASS
    assert PLANTED_PASS in str(planted.report)


@pytest.mark.long
def test_a_rank_that_raises_ends_the_check_with_its_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 of 2 failed.*raises_on_one_rank.*planted in a batch"):
        check_parity(make_model, raises_on_one_rank)


@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_check() -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 was ended by SIGKILL"):
        check_parity(make_model, dies_on_one_rank, timeout_s=600)


def test_wrong_use_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot be sent.*top level of a module"):
        check_parity(lambda: nn.Linear(2, 2), make_batch)
    with pytest.raises(ConfigError, match=r"(?s)reference cannot be 'fsdp3'.*'fsdp2'"):
        check_parity(make_model, make_batch, reference="fsdp3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="3 ranks cannot form 2 equal groups"):
        check_parity(make_model, make_batch, world_size=3, replicas=2)
    with pytest.raises(ConfigError, match=r"(?s)option 'mesh' is not for this call"):
        check_parity(make_model, make_batch, options={"mesh": None})
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="FSDP1 does not cast outputs"):
        check_parity(make_model, make_batch, reference="fsdp1", mp_policy=policy)
    for beside in ({"mp_policy": MixedPrecisionPolicy()}, {"reshard_after_forward": False}, {"replicas": 2}):
        arguments: dict[str, Any] = {"prepare": shard, **beside}
        with pytest.raises(ConfigError, match="and replicas say how it is sharded, too"):
            check_parity(make_model, make_batch, **arguments)


@pytest.mark.long
def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows of a batch do not divide"):
        check_parity(make_model, odd_batch)


def test_the_command_exits_2_for_a_function_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", f"{HERE}:nothing"]) == 2
    assert "cannot find" in capsys.readouterr().err
