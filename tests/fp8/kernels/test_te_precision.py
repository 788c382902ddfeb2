"""Fabric's TransformerEngine plugin and TransformerEngine's contexts around a model that we capture."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import transformer_engine as lightning_plugin
from torch import Tensor, nn

from harness import te_kernels
from harness.fabric import make_fabric
from thunder_memsave.config import ConfigError

OURS: dict[str, Any] = {"backend": "transformer_engine", "recipe": "current"}


@pytest.fixture
def plugin(
    transformer_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> type[lightning_plugin.TransformerEnginePrecision]:
    monkeypatch.setattr(lightning_plugin, "_TRANSFORMER_ENGINE_AVAILABLE", True)
    return lightning_plugin.TransformerEnginePrecision


def te_recipe(name: str, **options: Any) -> Any:
    return getattr(importlib.import_module("transformer_engine.common.recipe"), name)(**options)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of three steps."""

    outputs: list[Tensor]
    weights: list[Tensor]
    types: list[str]
    """Types of the submodules."""
    num_gemms: list[int]
    """Number of TransformerEngine's GEMMs in each step."""


def train(context: AbstractContextManager[Any] | None = None, **arguments: Any) -> Trained:
    model = small_model()
    fabric = make_fabric(**arguments)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    outputs: list[Tensor] = []
    num_gemms = []
    for _ in range(3):
        te_kernels.calls.clear()
        with context or nullcontext():
            outputs.append(model(x))
        fabric.backward(outputs[-1].float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        num_gemms.append(len(te_kernels.calls.gemms))
    weights = [p.detach().clone() for p in model.parameters()]
    types = [type(m).__name__ for m in model.modules()]
    return Trained(outputs=outputs, weights=weights, types=types, num_gemms=num_gemms)


def assert_same(result: Trained, expected: Trained) -> None:
    for ours, theirs in zip(
        [*result.outputs, *result.weights], [*expected.outputs, *expected.weights], strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_plugin_computes_what_fp8_with_its_recipe_does_with_emulated_kernels(
    plugin: type[lightning_plugin.TransformerEnginePrecision],
) -> None:
    recipe = te_recipe("DelayedScaling", amax_history_len=4)
    result = train(plugins=[plugin(weights_dtype=torch.bfloat16, recipe=recipe)])
    # Forward of two, their grad_weight, one grad_input; the first step measures operations too.
    assert result.num_gemms[1:] == [5, 5]
    expected = train(
        precision="bf16-true",
        fp8={"backend": "transformer_engine", "recipe": "delayed", "amax_history_len": 4},
    )
    assert_same(result, expected)
    assert result.types.count("Linear") == 2
    assert {w.dtype for w in result.weights} == {torch.bfloat16}


@pytest.mark.usefixtures("plugin")
def test_its_name_takes_its_default_recipe_with_emulated_kernels() -> None:
    fabric = make_fabric(precision="transformer-engine")
    config = fabric.strategy.config.fp8  # type: ignore[attr-defined]
    assert (config.backend, config.recipe, config.fp8_format) == (
        "transformer_engine",
        "delayed",
        "HYBRID",
    )
    assert config.amax_history_len == 1024


def test_layers_that_are_to_be_replaced_are_refused(
    plugin: type[lightning_plugin.TransformerEnginePrecision],
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_fabric(plugins=[plugin(weights_dtype=torch.bfloat16, replace_layers=True)])
    assert str(caught.value) == (
        "TransformerEnginePrecision has replace_layers=True, but TransformerEngine's modules cannot be captured; pass "
        "replace_layers=False: the model's own linears compute in fp8."
    )


@pytest.mark.usefixtures("plugin")
def test_the_plugin_and_fp8_may_say_the_same() -> None:
    fabric = make_fabric(precision="transformer-engine", fp8={"skip_modules": ["0"]})
    config = fabric.strategy.config.fp8  # type: ignore[attr-defined]
    assert config.backend == "transformer_engine"
    assert config.skip_modules == ("0",)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("fp8", "shown"),
    [
        ({"recipe": "current"}, "recipe='delayed', but fp8.recipe is 'current'"),
        ({"margin": 1}, "margin=0, but fp8.margin is 1"),
        ({"backend": "torch"}, "backend='transformer_engine', but fp8.backend is 'torch'"),
    ],
)
def test_the_plugin_and_fp8_may_not_contradict_each_other(fp8: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_fabric(precision="transformer-engine", fp8=fp8)
    assert str(caught.value) == (
        f"the precision plugin TransformerEnginePrecision asks for {shown}; make the two the same, or keep fp8 and "
        "use precision='bf16-true'."
    )


@pytest.mark.parametrize(
    ("name", "argument", "recipe", "theirs"),
    [
        ("autocast", "recipe", "current", "Float8CurrentScaling"),
        ("autocast", "recipe", "delayed", "DelayedScaling"),
        # Its older name.
        ("fp8_autocast", "fp8_recipe", "delayed", "DelayedScaling"),
    ],
)
@pytest.mark.filterwarnings("ignore:fp8_autocast:DeprecationWarning")
def test_the_same_context_around_a_model_changes_nothing_with_emulated_kernels(
    transformer_engine: ModuleType, name: str, argument: str, recipe: str, theirs: str
) -> None:
    make_context = getattr(transformer_engine, name)
    context = make_context(enabled=True, **{argument: te_recipe(theirs)})
    ours = {**OURS, "recipe": recipe}
    result = train(context, precision="bf16-true", fp8=ours)
    assert_same(result, train(precision="bf16-true", fp8=ours))


def test_another_context_around_a_model_is_refused(transformer_engine: ModuleType) -> None:
    context = transformer_engine.autocast(enabled=True, recipe=te_recipe("DelayedScaling"))
    with pytest.raises(
        ConfigError, match=r"te\.autocast with recipe='delayed', but .* fp8\.recipe 'current'"
    ):
        train(context, precision="bf16-true", fp8=OURS)


def test_a_context_around_a_model_without_fp8_is_refused(transformer_engine: ModuleType) -> None:
    context = transformer_engine.autocast(enabled=True, recipe=te_recipe("DelayedScaling"))
    with pytest.raises(
        ConfigError, match="recipe 'delayed', but the model was set up without `fp8`"
    ):
        train(context, precision="bf16-true")


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_both_backends_train_alike_with_emulated_kernels(recipe: str) -> None:
    fp8 = {"backend": "torch", "recipe": recipe}
    expected = train(precision="bf16-true", fp8=fp8)
    fp8 = {"backend": "transformer_engine", "recipe": recipe}
    assert_same(train(precision="bf16-true", fp8=fp8), expected)


def test_a_module_of_transformer_engine_is_refused_with_the_way_out(
    transformer_engine: ModuleType,
) -> None:
    linear = transformer_engine.ops.BasicLinear(32, 16, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="BasicLinear") as caught:
        make_fabric().setup(nn.Sequential(nn.Linear(32, 32), nn.Sequential(linear)))
    assert str(caught.value) == (
        "1.0 is TransformerEngine's BasicLinear, whose computation cannot be captured; put the module of torch.nn in "
        "its place: with `fp8` set, nn.Linear computes with TransformerEngine's kernels. In eager code, "
        "thunder_memsave.checkpoint() serves such modules."
    )
