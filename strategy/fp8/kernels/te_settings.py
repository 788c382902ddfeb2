"""Converts TransformerEngine's recipes and contexts to the `fp8` section, and refuses those that contradict it.

A recipe is accepted if all of its options are supported. `te.autocast` around a call is accepted if it asks for the
model's own settings, since captured linears ignore it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from thunder_memsave.config import ConfigError, Fp8Config
from thunder_memsave.fp8.recipe import Recipe, recipe_of

# By class: our name for the recipe, and the options of which only one value is supported.
_RECIPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DelayedScaling": ("delayed", {"scaling_factor_compute_algo": None}),
    "Float8CurrentScaling": ("current", {"use_power_2_scales": False}),
    "Float8BlockScaling": (
        "block",
        {
            "use_f32_scales": False,
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
        },
    ),
    "MXFP8BlockScaling": ("mxfp8", {"margin": 0, "enable_2d_quantization": False}),
    "NVFP4BlockScaling": (
        "nvfp4",
        {
            "disable_rht": False,
            "disable_stochastic_rounding": False,
            "disable_2d_quantization": False,
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
        },
    ),
}
_OF_ALL: Mapping[str, Any] = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
_TAKEN = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax")
_ALGORITHMS = ("max", "most_recent")


def config_of(recipe: Any) -> Fp8Config:
    """Return the `fp8` section that is equivalent to a recipe of TransformerEngine.

    Raises:
        ConfigError: The recipe, or an option of it, is not supported; the message names it.
    """
    kind = type(recipe).__name__
    if kind not in _RECIPES:
        raise ConfigError(
            f"TransformerEngine's recipe {kind} is not computed by thunder_memsave; "
            f"use {', '.join(_RECIPES)}, or no fp8."
        )
    name, only = _RECIPES[kind]
    for option, value in {**_OF_ALL, **only}.items():
        _refuse_other(recipe, option, value)
    taken = {option: getattr(recipe, option) for option in _TAKEN if name == "delayed"}
    if taken.get("amax_compute_algo", "max") not in _ALGORITHMS:
        _refuse(recipe, "amax_compute_algo", " or ".join(map(repr, _ALGORITHMS)))
    return Fp8Config(
        backend="transformer_engine",
        recipe=name,  # type: ignore[arg-type]
        fp8_format=recipe.fp8_format.name,
        **taken,
    )


def refuse_contradiction(recipe: Recipe | None) -> None:
    """Refuse a call inside a `te.autocast` whose settings differ from the model's.

    Args:
        recipe: The recipe of the model's linears; None: they do not run in fp8.

    Raises:
        ConfigError: They differ; the message names both settings.
    """
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is None or not _is_inside_autocast(quantization):
        return
    state: Any = quantization.FP8GlobalStateManager
    if not state.is_fp8_enabled():
        if recipe is not None:
            raise ConfigError(
                "the call is inside te.autocast(enabled=False), but the model was set up with `fp8`, and its captured "
                "linears compute in fp8 everywhere; call it outside of that context, or set it up without `fp8`."
            )
        return
    asked = recipe_of(config_of(state.get_fp8_recipe()))
    if recipe is None:
        raise ConfigError(
            f"the call is inside te.autocast with the recipe {asked.name!r}, but the model was set up without `fp8`, "
            "and its captured linears do not look at the context; pass "
            f"ThunderMemsaveStrategy(fp8={{'recipe': {asked.name!r}}}), or leave te.autocast out."
        )
    found = difference(asked, recipe)
    if found is not None:
        key, theirs, ours = found
        raise ConfigError(
            f"the call is inside te.autocast with {key}={theirs!r}, but the model was set up with fp8.{key} {ours!r}, "
            "which its captured linears compute; make the two the same, or leave te.autocast out."
        )


def difference(asked: Recipe, ours: Recipe) -> tuple[str, Any, Any] | None:
    """Return the first option in which two recipes differ: our name for it, the asked value and ours."""
    for field in dataclasses.fields(Recipe):
        theirs, own = getattr(asked, field.name), getattr(ours, field.name)
        if theirs != own:
            return "recipe" if field.name == "name" else field.name, theirs, own
    return None


def _is_inside_autocast(quantization: Any) -> bool:
    manager = quantization.FP8GlobalStateManager
    state = getattr(manager, "quantization_state", None)
    # Older versions keep it on the class, in capitals.
    return bool((manager.AUTOCAST_DEPTH if state is None else state.autocast_depth) > 0)


def _refuse_other(recipe: Any, option: str, value: Any) -> None:
    if getattr(recipe, option, value) != value:  # older versions lack some
        _refuse(recipe, option, repr(value))


def _refuse(recipe: Any, option: str, instead: str) -> None:
    raise ConfigError(
        f"TransformerEngine's recipe {type(recipe).__name__} has {option}={getattr(recipe, option)!r}, which is not "
        f"computed by thunder_memsave; set it to {instead}."
    )
