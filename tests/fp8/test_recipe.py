"""Recipes have TransformerEngine's defaults and dtypes."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from thunder_memsave.config import Fp8Config
from thunder_memsave.fp8.recipe import Product, RecipeName, Role, recipe_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

TRANSFORMER_ENGINES: dict[RecipeName, str] = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


@pytest.mark.parametrize("name", TRANSFORMER_ENGINES)
def test_defaults_are_transformer_engines(transformer_engine: ModuleType, name: RecipeName) -> None:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    theirs = getattr(recipes, TRANSFORMER_ENGINES[name])()
    ours = recipe_of(Fp8Config(recipe=name))
    assert ours.fp8_format == theirs.fp8_format.name
    if name == "delayed":
        for option in ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"):
            assert getattr(ours, option) == getattr(theirs, option)


@pytest.mark.parametrize("name", ["current", "block"])
def test_fast_accumulation_is_where_transformer_engine_has_it(
    transformer_engine: ModuleType, name: RecipeName
) -> None:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    theirs: Any = getattr(recipes, TRANSFORMER_ENGINES[name])()
    ours = recipe_of(Fp8Config(recipe=name))
    products: dict[Product, Any] = {
        "forward": theirs.fp8_gemm_fprop,
        "grad_input": theirs.fp8_gemm_dgrad,
        "grad_weight": theirs.fp8_gemm_wgrad,
    }
    for product, parameters in products.items():
        assert ours.use_fast_accum(product) is not parameters.use_split_accumulator


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_recipes_without_a_choice_of_it_accumulate_fast_in_forward_only(
    transformer_engine: ModuleType, name: RecipeName
) -> None:
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    assert not hasattr(getattr(recipes, TRANSFORMER_ENGINES[name])(), "fp8_gemm_fprop")
    ours = recipe_of(Fp8Config(recipe=name))
    assert ours.use_fast_accum("forward") is not base._2X_ACC_FPROP
    assert ours.use_fast_accum("grad_input") is not base._2X_ACC_DGRAD
    assert ours.use_fast_accum("grad_weight") is not base._2X_ACC_WGRAD


@pytest.mark.parametrize(
    ("fp8_format", "of_gradients"), [("HYBRID", E5M2), ("E4M3", E4M3), (None, E5M2)]
)
def test_only_gradients_have_the_larger_range(fp8_format: Any, of_gradients: torch.dtype) -> None:
    recipe = recipe_of(Fp8Config(fp8_format=fp8_format))
    dtypes: dict[Role, torch.dtype] = {"input": E4M3, "weight": E4M3, "grad": of_gradients}
    assert {role: recipe.dtype(role) for role in dtypes} == dtypes
