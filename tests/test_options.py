"""`FSDPOptions`: what the backend accepts, and how it refuses the rest."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import ConfigError, FSDPOptions, fully_shard


def test_every_option_is_keyword_only_frozen_documented_and_has_a_default() -> None:
    options = FSDPOptions()
    documentation = inspect.getdoc(FSDPOptions) or ""
    for field in dataclasses.fields(FSDPOptions):
        assert field.kw_only
        assert f"\n    {field.name}: " in documentation, field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, field.name, None)


def test_no_options_are_the_defaults() -> None:
    assert FSDPOptions.from_dict(None) == FSDPOptions.from_dict({}) == FSDPOptions()
    assert FSDPOptions().lower == "inductor"
    given = FSDPOptions(lower="eager")
    assert FSDPOptions.from_dict(given) is given


def test_options_for_a_plain_model_are_arguments_of_fully_shard() -> None:
    policy, units = MixedPrecisionPolicy(param_dtype=torch.bfloat16), ModuleWrapPolicy({torch.nn.Linear})
    options = FSDPOptions(mp_policy=policy, reshard_after_forward=False, auto_wrap_policy=units, prefetch=2)
    assert options.sharding == {"mp_policy": policy, "reshard_after_forward": False, "auto_wrap_policy": units}
    assert options.sharding.keys() <= inspect.signature(fully_shard).parameters.keys()
    assert FSDPOptions().sharding == {}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("prefech", "prefetch"),
        ("Lower", "lower"),
        ("mixed_precision_policy", "mp_policy"),
        ("reshard_after_fwd", "reshard_after_forward"),
        ("wrap_policy", "auto_wrap_policy"),
        ("device_mesh", "mesh"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPOptions.from_dict({"lower": "eager", name: 1})
    assert caught.value.what == f"unknown option {name!r}"
    assert caught.value.instead == repr(nearest)
    assert "options={...}" in str(caught.value)


def test_an_option_that_is_near_to_none_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPOptions.from_dict({"zzz": 1})
    for field in dataclasses.fields(FSDPOptions):
        assert field.name in str(caught.value.instead)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("lower", "triton", '"inductor" or "eager"'),
        ("lower", None, '"inductor" or "eager"'),
        ("prefetch", -1, "0, 1, 2"),
        ("prefetch", 1.5, "0, 1, 2"),
        ("prefetch", True, "0, 1, 2"),
        ("prefetch", "1", "0, 1, 2"),
        ("memory_budget_gb", float("inf"), "a positive number"),
        ("memory_budget_gb", float("nan"), "a positive number"),
        ("memory_budget_gb", True, "a positive number"),
        ("poison", 1, "True or False"),
        ("inductor", ["max_autotune"], "a dict"),
        ("mp_policy", torch.bfloat16, "MixedPrecisionPolicy"),
        ("mp_policy", "bf16", "MixedPrecisionPolicy"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPOptions.from_dict({name: value})
    assert caught.value.what == f"option {name!r} cannot be {value!r}"
    assert allowed in str(caught.value.instead)
    assert name in str(caught.value.where)


@pytest.mark.parametrize("given", [{"mode": "max-autotune"}, {"options": {"inductor": {"cpp.threads": 1}}}])
def test_settings_of_inductor_are_refused_where_it_is_not_used(given: dict[str, Any]) -> None:
    from fsdp_compile.backend import fsdp

    options = {**given.get("options", {}), "lower": "eager"}
    with pytest.raises(ConfigError, match="Inductor is not used"):
        fsdp(torch.fx.symbolic_trace(torch.nn.Identity()), [torch.ones(1)], options=options, mode=given.get("mode"))
