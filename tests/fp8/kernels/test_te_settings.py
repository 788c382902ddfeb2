"""TransformerEngine's recipes and contexts are accepted if we compute the same, else refused."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from thunder_memsave.config import ConfigError, Fp8Config
from thunder_memsave.fp8.kernels.te_settings import config_of, refuse_contradiction
from thunder_memsave.fp8.recipe import recipe_of

CURRENT = recipe_of(Fp8Config(recipe="current"))
DELAYED = recipe_of(Fp8Config())


def te_recipe(name: str, **options: Any) -> Any:
    module = importlib.import_module("transformer_engine.common.recipe")
    if "fp8_format" in options:
        options["fp8_format"] = getattr(module.Format, options["fp8_format"])
    return getattr(module, name)(**options)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("DelayedScaling", {}, {}),
        (
            "DelayedScaling",
            {
                "margin": 2,
                "fp8_format": "E4M3",
                "amax_history_len": 16,
                "amax_compute_algo": "most_recent",
                "reduce_amax": False,
            },
            {
                "margin": 2,
                "fp8_format": "E4M3",
                "amax_history_len": 16,
                "amax_compute_algo": "most_recent",
                "reduce_amax": False,
            },
        ),
        ("Float8CurrentScaling", {}, {"recipe": "current"}),
        ("Float8BlockScaling", {}, {"recipe": "block"}),
        (
            "Float8BlockScaling",
            {"fp8_format": "HYBRID"},
            {"recipe": "block", "fp8_format": "HYBRID"},
        ),
        ("MXFP8BlockScaling", {}, {"recipe": "mxfp8"}),
        (
            "MXFP8BlockScaling",
            {"fp8_format": "HYBRID"},
            {"recipe": "mxfp8", "fp8_format": "HYBRID"},
        ),
        ("NVFP4BlockScaling", {}, {"recipe": "nvfp4"}),
    ],
)
def test_a_recipe_is_taken_over_with_its_options(
    name: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_of(te_recipe(name, **options))
    assert config.backend == "transformer_engine"
    assert recipe_of(config) == recipe_of(Fp8Config(**expected))


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("name", "options", "shown", "instead"),
    [
        ("DelayedScaling", {"fp8_mha": True}, "fp8_mha=True", "False"),
        (
            "DelayedScaling",
            {"amax_compute_algo": max},
            "amax_compute_algo=<built-in function max>",
            "'max' or 'most_recent'",
        ),
        (
            "DelayedScaling",
            {"scaling_factor_compute_algo": max},
            "scaling_factor_compute_algo=<built-in",
            "None",
        ),
        ("Float8CurrentScaling", {"use_power_2_scales": True}, "use_power_2_scales=True", "False"),
        (
            "Float8CurrentScaling",
            {"backward_override": "dequantized"},
            "backward_override='dequantized'",
            "None",
        ),
        ("Float8BlockScaling", {"use_f32_scales": True}, "use_f32_scales=True", "False"),
        ("Float8BlockScaling", {"w_block_scaling_dim": 1}, "w_block_scaling_dim=1", "2"),
        (
            "MXFP8BlockScaling",
            {"enable_2d_quantization": True},
            "enable_2d_quantization=True",
            "False",
        ),
        ("MXFP8BlockScaling", {"margin": 1}, "margin=1", "0"),
        (
            "MXFP8BlockScaling",
            {"backward_override": "high_precision"},
            "backward_override='high_precision'",
            "None",
        ),
        ("NVFP4BlockScaling", {"disable_rht": True}, "disable_rht=True", "False"),
        (
            "NVFP4BlockScaling",
            {"disable_stochastic_rounding": True},
            "disable_stochastic_rounding=True",
            "False",
        ),
        ("NVFP4BlockScaling", {"nvfp4_4over6": "all"}, "nvfp4_4over6='all'", "'none'"),
    ],
)
def test_an_option_that_is_not_computed_is_named(
    name: str, options: dict[str, Any], shown: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(te_recipe(name, **options))
    message = str(caught.value)
    assert message.startswith(f"TransformerEngine's recipe {name} has {shown}")
    assert message.endswith(f"which is not computed by thunder_memsave; set it to {instead}.")


@pytest.mark.usefixtures("transformer_engine")
def test_a_recipe_that_is_not_computed_is_named() -> None:
    message = (
        "^TransformerEngine's recipe CustomRecipe is not computed by thunder_memsave; use .*, NVFP4BlockScaling, or no "
        r"fp8\.$"
    )
    with pytest.raises(ConfigError, match=message):
        config_of(te_recipe("CustomRecipe", qfactory=print))


def test_without_a_context_of_transformer_engine_nothing_is_refused() -> None:
    refuse_contradiction(None)
    refuse_contradiction(CURRENT)


def test_a_context_that_asks_for_what_is_computed_is_let_through(
    transformer_engine: ModuleType,
) -> None:
    with transformer_engine.autocast(enabled=True, recipe=te_recipe("Float8CurrentScaling")):
        refuse_contradiction(CURRENT)
    with transformer_engine.autocast(enabled=True, recipe=te_recipe("DelayedScaling")):
        refuse_contradiction(DELAYED)
    refuse_contradiction(None)


@pytest.mark.parametrize(
    ("name", "ours"), [("MXFP8BlockScaling", "mxfp8"), ("NVFP4BlockScaling", "nvfp4")]
)
def test_a_context_of_a_recipe_of_blackwell_is_let_through_there(
    transformer_engine_on_blackwell: ModuleType, name: str, ours: Any
) -> None:
    with transformer_engine_on_blackwell.autocast(enabled=True, recipe=te_recipe(name)):
        refuse_contradiction(recipe_of(Fp8Config(recipe=ours)))
        with pytest.raises(ConfigError, match=rf"recipe='{ours}', but .* fp8\.recipe 'current'"):
            refuse_contradiction(CURRENT)


def test_a_context_around_a_model_without_fp8_is_refused(transformer_engine: ModuleType) -> None:
    recipe = te_recipe("Float8CurrentScaling")
    with (
        transformer_engine.autocast(enabled=True, recipe=recipe),
        pytest.raises(ConfigError) as caught,
    ):
        refuse_contradiction(None)
    assert str(caught.value) == (
        "the call is inside te.autocast with the recipe 'current', but the model was set up without `fp8`, and its "
        "captured linears do not look at the context; pass ThunderMemsaveStrategy(fp8={'recipe': 'current'}), or "
        "leave te.autocast out."
    )


def test_a_context_that_switches_fp8_off_is_refused(transformer_engine: ModuleType) -> None:
    with (
        transformer_engine.autocast(enabled=False),
        pytest.raises(
            ConfigError, match=r"^the call is inside te\.autocast\(enabled=False\), but the"
        ),
    ):
        refuse_contradiction(DELAYED)
    with transformer_engine.autocast(enabled=False):
        refuse_contradiction(None)


@pytest.mark.parametrize(
    ("name", "options", "difference"),
    [
        ("Float8CurrentScaling", {}, r"recipe='current', but .* fp8\.recipe 'delayed'"),
        ("DelayedScaling", {"margin": 1}, r"margin=1, but .* fp8\.margin 0"),
        (
            "DelayedScaling",
            {"amax_history_len": 8},
            r"amax_history_len=8, but .* fp8\.amax_history_len 1024",
        ),
        (
            "DelayedScaling",
            {"fp8_format": "E4M3"},
            r"fp8_format='E4M3', but .* fp8\.fp8_format 'HYBRID'",
        ),
    ],
)
def test_a_context_that_asks_for_something_else_is_refused(
    transformer_engine: ModuleType, name: str, options: dict[str, Any], difference: str
) -> None:
    recipe = te_recipe(name, **options)
    with (
        transformer_engine.autocast(enabled=True, recipe=recipe),
        pytest.raises(ConfigError, match=difference),
    ):
        refuse_contradiction(DELAYED)
