"""`plan`: its prices are those of `explain`, what it says fits does, and its advice helps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.nn.modules.batchnorm import _BatchNorm

import fsdp_compile
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes, storage_bytes
from fsdp_compile import FSDPPrefetch, MixedPrecision
from fsdp_compile.cli.main import main
from fsdp_compile.config.policy import as_mixed_precision
from fsdp_compile.cost.calibrated import load_hardware
from fsdp_compile.cost.hardware import DEVICES, hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search import search as searching
from fsdp_compile.search.api import Fit, _tokens_of_a_sample, _written
from fsdp_compile.search.choice import Ask, Choice, Configuration, Form, Offload
from fsdp_compile.search.search import Found, Program, Search
from tests.cost.test_calibrated import FOUND
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Stack

HOSTS = hardware("cpu", "ethernet-10", ranks_per_host=2)
EAGER = FSDPOptions(lower="eager")
RANKS = 4


def _program(depth: int = 3) -> Program:
    with torch.device("meta"):
        return Program(Stack(depth), (torch.zeros(8, WIDTH),), {}, EAGER)


def _ask(memory_bytes: float = 1e9, samples: int = 8) -> Ask:
    return Ask(RANKS, HOSTS, memory_bytes, 0.0, RANKS * samples, 1, "adamw", ())


def _plan(program: Program | None = None, **asked: Any) -> Fit:
    program = program or _program()
    asked = {"gpus": RANKS, "tokens_per_step": 4 * RANKS, "hardware": HOSTS, "options": program.options, **asked}
    return fsdp_compile.plan(program.model, *program.args, **asked)


def _fit(made: Configuration, ask: Ask, program: Program) -> Fit:
    """As if a search had found this configuration."""
    return Fit("", ask, Found((made,), made, 1, None), (), program)


CHOICES = [
    Choice(4, 1, Reshard.AFTER_FORWARD, 8, 1),
    Choice(4, 1, Reshard.AFTER_BACKWARD, 8, 1),
    Choice(2, 2, Reshard.AUTO, 4, 2),
    Choice(2, 2, Reshard.AFTER_FORWARD, 8, 1, Form.BLOCKS),
    Choice(4, 1, Reshard.AFTER_FORWARD, 8, 1, offload=Offload.CPU),
    Choice(4, 1, Reshard.AFTER_FORWARD, 8, 1, post_forward=2),
    Choice(4, 1, Reshard.AFTER_FORWARD, 4, 2, Form.BLOCKS, post_forward=2),
    Choice(2, 2, Reshard.AUTO, 8, 1, gather_format="int8"),
    Choice(4, 1, Reshard.AFTER_FORWARD, 8, 1, offload=Offload.CPU, post_forward=2, gather_format="int8"),
]


def _name(choice: Choice) -> str:
    reshard = str(choice.reshard_after_forward)
    return "-".join((str(choice.shards), reshard, choice.form, choice.offload, choice.gather_format or "exact"))


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(_program(), _ask())


@pytest.mark.parametrize("choice", CHOICES, ids=_name)
def test_a_choice_is_priced_from_one_trace_as_explain_does_on_its_mesh(search: Search, choice: Choice) -> None:
    with searching.planning_world(RANKS):
        priced, made = search._price(choice, 0), search.configuration(choice)
    plan = _fit(made, search.ask, search.program).explain()
    assert priced.time_us == pytest.approx(plan.step_us)
    assert priced.peak_bytes == plan.peak_bytes
    assert priced.host_bytes == plan.host_bytes


class _Around(nn.Module):
    """A root that computes before its blocks, where its table is most of the memory, and after them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4096, WIDTH))
        self.blocks = Stack(depth).blocks
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(tokens, self.table)
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).exp()


def _around(depth: int) -> Program:
    with torch.device("meta"):
        return Program(_Around(depth), (torch.zeros(8, 64, dtype=torch.long),), {}, EAGER)


@pytest.mark.parametrize(
    ("program", "choice", "above"),
    [
        (_program, CHOICES[0], 0.02),
        (_program, CHOICES[5], 0.02),
        (_program, Choice(4, 1, Reshard.AUTO, 8, 1), 0.02),
        (_around, CHOICES[0], 0.15),
    ],
    ids=["blocks", "parts of blocks", "some blocks kept", "a root around them"],
)
def test_a_deep_model_is_priced_by_few_of_its_blocks(
    program: Callable[[int], Program], choice: Choice, above: float
) -> None:
    ask = _ask()
    short = Search(program(16), ask)
    assert short.stack is not None
    assert short.stack.blocks == 16
    with mock.patch.object(searching, "stack_of", return_value=None):
        full = Search(program(16), ask)
    with searching.planning_world(RANKS):
        estimated, exact = short._price(choice, 0), full._price(choice, 0)
    assert estimated.time_us == pytest.approx(exact.time_us, rel=0.02)
    assert 0.98 * exact.peak_bytes <= estimated.peak_bytes <= (1 + above) * exact.peak_bytes
    assert estimated.trained_bytes == exact.trained_bytes
    assert estimated.flops == exact.flops


def test_blocks_that_differ_in_a_setting_are_not_alike() -> None:
    model: Any = _program(16).model
    assert searching.stack_of(model) is not None
    model.blocks[3].norm.eps = 1e-3
    assert searching.stack_of(model) is None


def test_the_code_of_the_first_configuration_runs() -> None:
    fit = _plan(memory_gb=1.0)
    assert fit.fits
    assert fit.verdict.startswith("fits: ")
    assert [made.step_us for made in fit.best] == sorted(made.step_us for made in fit.best)
    first = fit.best[0]
    scope: dict[str, Any] = {"model": Stack(), "hardware": HOSTS}
    with fake_world(RANKS):
        exec(fit.code, scope)
        assert fit.code in str(fit)
        scope["compiled"](torch.zeros(first.choice.micro_batch, WIDTH)).sum().backward()
        scope["optimizer"].step()


def test_memory_that_holds_the_activations_of_some_blocks_computes_the_others_again() -> None:
    search = Search(_program(6), _ask(samples=512))
    choice = Choice(4, 1, Reshard.AFTER_FORWARD, 512, 1)
    with searching.planning_world(RANKS):
        saved = search.configuration(choice)
        search.ask = dataclasses.replace(search.ask, memory_bytes=0.8 * saved.peak_bytes)
        search.configuration.cache_clear()
        made = search.configuration(choice)
    assert saved.recomputed == 0
    assert 0 < made.recomputed < made.blocks
    assert made.step_us > saved.step_us
    assert made.peak_bytes <= search.ask.memory_bytes
    plan = _fit(made, search.ask, search.program).explain()
    assert made.budget_gb is not None
    assert plan.peak_bytes <= made.budget_gb * 1e9


def test_advice_makes_a_model_fit_that_does_not(tmp_path: Path) -> None:
    with searching.planning_world(RANKS):
        memory_gb = 0.85e-9 * Search(_program(), _ask(memory_bytes=1.0, samples=1)).smallest().peak_bytes
    given: dict[str, Any] = {"tokens_per_step": RANKS, "memory_gb": memory_gb}
    fit = _plan(**given)
    assert not fit.fits
    assert fit.verdict.startswith("does not fit: short by ")
    page = fit.save_html(tmp_path / "page.html").read_text()
    costs = [advice.gpu_s_per_token for advice in fit.advice]
    assert costs == sorted(costs)
    assert len(costs) > 1
    for advice in fit.advice:
        assert advice.change in page
        followed = _plan(**{**given, **advice.arguments})
        assert followed.fits, advice.change
        assert _peak_bytes(followed) <= followed.ask.memory_bytes, advice.change
    data = fit.to_dict()
    assert json.loads(json.dumps(data)) == data


def _peak_bytes(fit: Fit) -> int:
    """Peak of a step of the first configuration in the emulated network, by the very code that is written for it."""
    choice = fit.best[0].choice
    x = torch.zeros(choice.micro_batch, WIDTH)
    scope: dict[str, Any] = {"model": Stack(), "hardware": HOSTS}

    def step() -> None:
        for _ in range(choice.accumulation):
            scope["compiled"](x).sum().backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()

    torch.compiler.reset()
    with emulated_world(fit.ask.gpus, Network(Link(bytes_per_s=1e12))):
        exec(fit.code, scope)
        step()  # compiles, and makes the optimizer's state
        state = [value for of in scope["optimizer"].state.values() for value in of.values()]
        return measured_peak_bytes(scope["model"], x, step, "cpu") + storage_bytes(state)


def test_the_page_of_a_model_that_does_not_fit_is_of_what_it_takes_at_least(tmp_path: Path) -> None:
    program = dataclasses.replace(_program(6), args=(torch.zeros(512, WIDTH),))
    fit = _plan(program, tokens_per_step=512 * RANKS, memory_gb=1e-3)
    assert not fit.fits
    assert fit.verdict in fit.save_html(tmp_path / "page.html").read_text()
    assert fit.explain().peak_bytes <= 1.05 * fit.found.smallest.peak_bytes


def test_what_is_given_is_not_combined_with_what_it_excludes() -> None:
    looked_up = FSDPOptions(lower="eager", embedding="sharded")
    fit = _plan(_around(2), tokens_per_step=64 * 8 * RANKS, options=looked_up, allow=["int8_gathers"])
    assert {(c.choice.post_forward, c.choice.gather_format) for c in fit.best} == {(1, "")}
    assert fit.explain().peak_bytes <= fit.best[0].peak_bytes  # without the optimizer's state
    ahead = FSDPOptions(lower="eager", prefetch=1)
    search = Search(dataclasses.replace(_program(), options=ahead), _ask(memory_bytes=1.0, samples=512))
    with searching.planning_world(RANKS):
        assert search.configuration(Choice(4, 1, Reshard.AFTER_FORWARD, 512, 1)).budget_gb is None


def test_one_shard_is_sent_nowhere() -> None:
    fit = _plan(gpus=1, tokens_per_step=1, allow=["int8_gathers"])
    assert {c.choice.gather_format for c in fit.best} == {""}


WRONG = [
    ({"tokens_per_step": 5}, "not the same number of samples"),
    ({"optimizer": "best"}, "is not known"),
    ({"allow": ["luck"]}, "cannot be allowed"),
    ({"allow": ["cpu_offload"]}, "memory of a CPU is that of the host"),
    ({"memory_gb": -1.0}, "memory_gb cannot be"),
    ({"gpus": 0}, "cannot plan for 0 ranks"),
    ({"options": {"reshard_after_forward": True}}, "the search chooses reshard_after_forward"),
    ({"options": {"separate_reduce_group": True}}, "separate_reduce_group, or does not know of it"),
]


@pytest.mark.parametrize(("asked", "what"), WRONG, ids=[what for _, what in WRONG])
def test_what_cannot_be_searched_is_an_error(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        _plan(**asked)


def test_the_command_takes_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hardware.json"
    near = tuple(table for table in FOUND.collectives if table.on_one_host == table.ranks)
    path.write_text(dataclasses.replace(FOUND, collectives=near).to_text(), encoding="utf-8")
    measured = f"plan tests.models.round_sizes:stack --gpus 2 --tokens-per-step 128 --hardware {path}"
    assert main([*measured.split(), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["asked"]["links_measured"] == ["nvlink4"]
    assert said["asked"]["memory_bytes"] == FOUND.memory_bytes
    assert f"\"hardware\": '{path}'" in said["code"]
    assert "# the file is of 16 ranks: run fsdp-compile calibrate on 2" in said["code"]
    assert main([*measured.split(), "--link", "1"]) == 2
    assert "--hardware, or the others" in capsys.readouterr().err


COMMAND = "plan tests.models.round_sizes:stack --gpus 2 --tokens-per-step 128 --device cpu --link 1 --memory 1GB"


def _said(flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status = main([*COMMAND.split(), "--json", *flags.split()])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["fits"] == (status == 0)
    return said


def test_each_flag_of_the_command_does_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    before = _said(f"--html {page}", capsys)
    assert before["verdict"] in page.read_text()
    least = before["smallest"]["memory_bytes"]
    assert least["optimizer"] == 2 * least["parameters"]
    assert _said("--optimizer sgd", capsys)["smallest"]["memory_bytes"]["optimizer"] == 0
    assert _said("--reserve 0.25GB", capsys)["asked"]["reserve_bytes"] == 0.25e9
    assert _said("--allow cpu_offload --device h100", capsys)["smallest"]["memory_bytes"]["parameters"] == 0
    assert "gather_dtype=torch.int8" in _said("--allow int8_gathers --link 0.001", capsys)["code"]
    assert _said("--allow int8_gathers --link 0.001", capsys)["best"][0]["gather_format"] == "int8"
    assert _said("--param-dtype float32", capsys)["smallest"]["memory_bytes"]["gathered"] > least["gathered"]
    apart, together = (_said(f"--link ethernet-1 --gpus-per-node {ranks}", capsys)["best"][0] for ranks in (1, 2))
    assert apart["step_us"] > together["step_us"]
    assert _said("--link 0.001", capsys)["best"][0]["step_us"] > before["best"][0]["step_us"]
    assert _said("--device h100", capsys)["asked"]["device"] == "h100-sxm"
    assert _said("--tokens-per-step 256", capsys)["best"][0]["step_us"] > before["best"][0]["step_us"]


GIVEN: list[dict[str, Any]] = [
    {"mp_policy": MixedPrecision(torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)},
    {"mp_policy": MixedPrecision(full_precision_classes=(nn.LayerNorm, _BatchNorm, Stack)), "bucket_mb": 2.5},
    {"mp_policy": FSDP1MixedPrecision(torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm,))},
    {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32), "reduce_layout": ReduceLayout.FSDP2},
    {"prefetch": BackwardPrefetch.BACKWARD_POST},
    {"prefetch": FSDPPrefetch(backward=None, forward=True)},
]


@pytest.mark.parametrize("given", GIVEN, ids=[str(number) for number in range(len(GIVEN))])
@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[4], CHOICES[7]], ids=_name)
def test_the_code_has_all_that_was_given_and_the_link(given: dict[str, Any], choice: Choice) -> None:
    options, there = FSDPOptions(lower="eager", **given), hardware("h100-sxm", 12.5)
    made = Configuration(choice, 1.0, 1.0, 1.0, {}, 1, 2, None if "prefetch" in given else 0.5, 0.0)
    fit = _fit(made, dataclasses.replace(_ask(), hardware=there), dataclasses.replace(_program(), options=options))
    sharded: list[dict[str, Any]] = []
    compiled: list[dict[str, Any]] = []
    with (
        fake_world(RANKS),
        mock.patch("fsdp_compile.fully_shard", lambda _, **settings: sharded.append(settings)),
        mock.patch("torch.compile", lambda _, **settings: compiled.append(settings)),
    ):
        exec(fit.code.replace("'cuda'", "'cpu'"), {"model": Stack()})
    (settings,), (call,) = sharded, compiled
    policy = options.mp_policy
    if choice.gather_format:
        policy = dataclasses.replace(as_mixed_precision(policy), gather_dtype=torch.int8)
    assert settings.pop("mp_policy", None) == policy
    assert isinstance(settings.pop("offload_policy", None), CPUOffloadPolicy) == (choice.offload is Offload.CPU)
    assert settings.pop("mesh").shape == choice.mesh[0]
    assert settings == {"reshard_after_forward": choice.reshard_after_forward}
    planned: dict[str, Any] = {} if "prefetch" in given else {"hardware": there, "memory_budget_gb": 0.5}
    assert FSDPOptions(**call["options"]) == dataclasses.replace(options, mp_policy=None, regions="whole", **planned)


def test_a_class_that_no_module_has_is_written_by_its_name() -> None:
    class Inside(nn.Module):
        pass

    imports: set[str] = set()
    assert _written((Inside, _Around), imports) == f"(Inside, {__name__}._Around,)"
    assert imports == {__name__}


def test_mfu_is_of_the_data_sheets_peak(search: Search, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(FOUND.to_text(), encoding="utf-8")
    there = load_hardware(path)
    half = Search(search.program, dataclasses.replace(search.ask, hardware=there))
    with searching.planning_world(RANKS):
        made, flops = half.configuration(CHOICES[0]), half._price(CHOICES[0], 0).flops
    assert there.device.matmul_peak(torch.float32).value == 40e12
    assert made.mfu == pytest.approx(flops / (made.step_us * 1e-6) / DEVICES["h100-sxm"].matmul[torch.float32].value)


@pytest.mark.parametrize("wrong", ["--memory much", "--tokens-per-step few", "--device abacus", "--gpus 0"])
def test_the_command_refuses_what_is_no_number_or_name(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), *wrong.split()]) == 2
    assert "instead" in capsys.readouterr().err


def test_all_gpus_shard_also_where_they_fill_no_whole_hosts() -> None:
    six = dataclasses.replace(_ask(memory_bytes=1.0, samples=6), gpus=6, hardware=hardware("h100-sxm", "ib-400"))
    assert {choice.shards for choice in six.choices()} == {2, 6}


def test_tokens_are_counted_in_ids_and_not_in_masks() -> None:
    mask, ids = torch.ones(2, 1, 128, 128, dtype=torch.bool), torch.zeros(2, 128, dtype=torch.int64)
    assert _tokens_of_a_sample((mask,), {"input_ids": ids}) == 128
