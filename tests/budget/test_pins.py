"""Patterns of module names pin activations to be kept or recomputed."""

from __future__ import annotations

import pytest

from thunder_memsave.budget.pins import check_pins, pin_of
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.actions import KEEP, RECOMPUTE
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.schema import parse_section

MODULES = ["", "model", "model.layers.0", "model.layers.0.mlp", "model.layers.0.mlp.up_proj"]


def test_a_pattern_names_a_module_and_all_within() -> None:
    memory = MemoryConfig(keep=("*.mlp",), recompute=("model.embed",))
    check_pins(MemoryConfig(keep=("*.mlp",)), MODULES)
    assert pin_of(memory, "model.layers.0.mlp.up_proj") == KEEP
    assert pin_of(memory, "model.layers.0.mlp") == KEEP
    assert pin_of(memory, "model.embed.weight") == RECOMPUTE
    assert pin_of(memory, "model.layers.0.mlp2") is None
    assert pin_of(memory, "") is None


@pytest.mark.parametrize("key", ["keep", "recompute"])
def test_a_pattern_that_names_nothing_is_refused_with_near_names(key: str) -> None:
    message = (
        rf"memory\.{key} has 'layers\.0\.mlp', which names no module .* 'model\.layers\.0\.mlp'"
    )
    with pytest.raises(ConfigError, match=message):
        check_pins(parse_section(MemoryConfig, {key: ["layers.0.mlp"]}, where="memory"), MODULES)


def test_a_module_in_both_lists_is_refused() -> None:
    memory = MemoryConfig(keep=("model.layers.*",), recompute=("*.up_proj",))
    with pytest.raises(ConfigError, match=r"both name 'model\.layers\.0\.mlp\.up_proj', or a mod"):
        check_pins(memory, MODULES)
