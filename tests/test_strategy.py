"""Fabric's contract on one device: settings, refusals, and each hook."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.fabric import make_fabric
from thunder_memsave import ConfigError, ShardingConfig, ThunderMemsaveStrategy
from thunder_memsave.fabric.forward_module import ForwardModule


class TwoMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def unmarked(self, x: Tensor) -> Tensor:
        return self.body(x)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# Settings.


@pytest.mark.parametrize("sharding", ["none", {"mode": "none"}, ShardingConfig(mode="none")])
def test_sharding_is_a_string_a_mapping_or_the_dataclass(sharding: Any) -> None:
    assert ThunderMemsaveStrategy(sharding=sharding).config.sharding.mode == "none"


def test_the_defaults_shard() -> None:
    config = ThunderMemsaveStrategy().config
    assert config.sharding.mode == "zero2"
    assert config.timeout == timedelta(minutes=30)
    assert config.state_dict_type == "sharded"


def test_a_misspelled_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'zero22', but must be one of 'none', 'zero2'"):
        ThunderMemsaveStrategy(sharding="zero22")


def test_a_misspelled_key_of_fp8_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^ThunderMemsaveStrategy\.fp8\.backends is not a key.*; did you mean 'backend'",
    ):
        ThunderMemsaveStrategy(fp8={"backends": "torch"})


def test_the_yaml_file_sets_what_the_constructor_does(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("strategy: {sharding: none, timeout: 5min}\ntrain: {max_steps: 3}\n")
    config = ThunderMemsaveStrategy.from_config(path).config
    assert (config.sharding.mode, config.timeout) == ("none", timedelta(minutes=5))


def test_the_registry_makes_the_strategy() -> None:
    registry = _StrategyRegistry()
    ThunderMemsaveStrategy.register_strategies(registry)
    assert isinstance(registry.get("thunder_memsave"), ThunderMemsaveStrategy)


def test_the_checkpoint_plugin_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="every rank writes and reads its own part"):
        ThunderMemsaveStrategy(checkpoint_io=TorchCheckpointIO())
    with pytest.raises(NotImplementedError, match="does not use the CheckpointIO plugin"):
        _ = ThunderMemsaveStrategy().checkpoint_io


# Processes.


def strategy_of(num_nodes: int, devices: int) -> ThunderMemsaveStrategy:
    fabric = Fabric(
        strategy="thunder_memsave", accelerator="cpu", devices=devices, num_nodes=num_nodes
    )
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    return fabric.strategy


def test_the_number_of_nodes_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    strategy = strategy_of(num_nodes=2, devices=3)
    assert strategy.num_nodes == 2
    assert strategy.world_size == 6
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 3}
    assert isinstance(strategy.launcher, _SubprocessScriptLauncher)


def test_one_device_needs_no_launcher_and_no_process_group() -> None:
    strategy = strategy_of(num_nodes=1, devices=1)
    assert strategy.launcher is None
    strategy.setup_environment()
    assert not torch.distributed.is_initialized()
    assert strategy.data_parallel is None


def test_devices_that_contradict_the_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = strategy_of(num_nodes=1, devices=1)
    monkeypatch.setattr(LightningEnvironment, "world_size", lambda self: 2)
    with pytest.raises(ConfigError, match=r"devices=1, num_nodes=1\) asks for 1 processes, but "):
        strategy.setup_environment()


def test_dataloaders_get_a_distributed_sampler() -> None:
    fabric = make_fabric()
    loader: Any = fabric.setup_dataloaders(DataLoader(TensorDataset(batch()), batch_size=2))
    assert isinstance(loader.sampler, torch.utils.data.DistributedSampler)
    assert len(list(loader)) == 3


# Setup.


@pytest.mark.parametrize("order", ["joint", "optimizer first", "optimizer last"])
def test_setup_in_any_order_trains(order: str) -> None:
    fabric, model, reference = make_fabric(), small_model(), small_model()
    make_optimizer = torch.optim.AdamW
    if order == "joint":
        model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    elif order == "optimizer first":
        optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
        model = fabric.setup_module(model)
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    plain_step(reference, make_optimizer(reference.parameters()), batch())
    fabric.backward(model(batch()).square().mean())
    optimizer.step()
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, expected)


def test_parameters_are_the_models_own() -> None:
    original = small_model()
    own = list(original.parameters())
    model = make_fabric().setup(original)
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))
    assert [
        name.removeprefix("_forward_module.module.") for name, _ in model.named_parameters()
    ] == [name for name, _ in original.named_parameters()]
    assert all(p.unsharded_shape == p.shape for p in model.parameters())


def test_state_dict_is_the_models_own() -> None:
    model = make_fabric().setup(small_model())
    expected = small_model().state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_a_model_is_set_up_once() -> None:
    model = small_model()
    make_fabric().setup(model)
    with pytest.raises(ValueError, match="the model was set up before"):
        make_fabric().setup(model)


def eagerly_compiled(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compiled with torch.compile, and Fabric would compile"):
        make_fabric().setup(eagerly_compiled(small_model()))
    with pytest.raises(ValueError, match=r"OptimizedModule; .* before torch.compile"):
        make_fabric().setup(eagerly_compiled(small_model()), _reapply_compile=False)


def test_a_refused_model_is_unchanged() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"torch.compile"):
        make_fabric().setup(eagerly_compiled(model))
    make_fabric().setup(model)


def test_a_model_compiled_in_place_is_refused() -> None:
    model = small_model()
    next(model.children()).compile(backend="eager")
    with pytest.raises(ValueError, match=r"0 was compiled in place with Module.compile\(\)"):
        make_fabric().setup(model)


def test_a_thunder_module_is_refused() -> None:
    import thunder

    with pytest.raises(ValueError, match=r"the model is a ThunderModule; .* before thunder.jit"):
        make_fabric().setup(thunder.jit(small_model()))


def test_a_data_parallel_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 is a DataParallel; .* pass the model that it wraps"):
        make_fabric().setup(nn.Sequential(nn.DataParallel(small_model())))


def test_a_model_on_meta_is_made_in_setup() -> None:
    fabric = make_fabric()
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    assert all(p.is_meta for p in model.parameters())
    model = fabric.setup(model)
    assert not any(p.is_meta for p in model.parameters())
    assert model(batch()).isfinite().all()


def test_an_optimizer_made_on_meta_trains_after_joint_setup() -> None:
    fabric = make_fabric()
    with fabric.init_module(empty_init=True):
        model = nn.Linear(4, 5)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    fabric.backward(model(batch()).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_init_module_makes_real_weights_by_default() -> None:
    with make_fabric().init_module():
        model = nn.Linear(4, 5)
    assert model.weight.device.type == "cpu"


# Methods other than forward.


def test_a_marked_method_and_forward_return_their_own_results() -> None:
    torch.manual_seed(0)
    original = TwoMethods()
    reference = copy.deepcopy(original)
    model = make_fabric().setup(original)
    model.mark_forward_method("doubled")
    for _ in range(2):
        torch.testing.assert_close(model(batch()), reference(batch()))
        torch.testing.assert_close(model.doubled(batch()), 2 * reference(batch()))
    assert "forward" not in vars(original)
    captured = [compiled.method for compiled in model._forward_module.captures]
    assert sorted(captured) == ["doubled", "forward"]


def test_a_step_method_needs_no_mark_and_has_gradients() -> None:
    torch.manual_seed(0)
    original = TwoMethods()
    reference = copy.deepcopy(original)
    fabric = make_fabric()
    model = fabric.setup(original)
    fabric.backward(model.training_step(batch()))
    reference.training_step(batch()).backward()
    torch.testing.assert_close(original.body.weight.grad, reference.body.weight.grad)


class Lightning(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def training_step(self, x: Tensor, batch_index: int) -> Tensor:
        return self.body(x).square().mean()

    def validation_step(self, x: Tensor, batch_index: int) -> Tensor:
        return self.body(x).sum()


def test_a_lightning_module_trains_through_its_step_methods() -> None:
    fabric, original = make_fabric(), Lightning()
    reference = copy.deepcopy(original.body)
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.1))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i in range(2):
        torch.testing.assert_close(model.validation_step(batch(), i), reference(batch()).sum())
        fabric.backward(model.training_step(batch(), i))
        optimizer.step()
        optimizer.zero_grad()
        plain_step(reference, expected, batch())
    torch.testing.assert_close(original.body.weight, reference.weight)


def test_a_forward_that_the_user_patched_stays() -> None:
    original = TwoMethods()
    original.forward = lambda x: original.body(x) + 1  # type: ignore[method-assign]
    patched = original.forward
    expected = original.body(batch()) + 1
    model = make_fabric().setup(original)
    model.mark_forward_method("doubled")
    torch.testing.assert_close(model.doubled(batch()), 2 * expected)
    assert vars(original)["forward"] is patched
    torch.testing.assert_close(model(batch()), expected)


def test_an_unmarked_method_is_refused_by_fabric() -> None:
    model = make_fabric().setup(TwoMethods())
    with pytest.raises(RuntimeError, match=r"mark_forward_method\('unmarked'\)"):
        model.unmarked(batch())


# Gradients.


def test_accumulation_under_no_backward_sync_is_the_sum() -> None:
    fabric, reference = make_fabric(), small_model()
    model = fabric.setup(small_model())
    for i in range(3):
        with fabric.no_backward_sync(model, enabled=i < 2):
            fabric.backward(model(batch(i)).sum())
        reference(batch(i)).sum().backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_no_backward_sync_needs_a_model_that_was_set_up() -> None:
    control = ThunderMemsaveStrategy()._backward_sync_control
    assert control is not None
    with pytest.raises(TypeError, match=r"needs a model that fabric.setup\(\) returned"):
        control.no_backward_sync(nn.Linear(2, 2), enabled=True)


def test_loss_backward_needs_no_fabric() -> None:
    model = make_fabric().setup(small_model())
    model(batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_clipping_by_norm_returns_the_norm_before() -> None:
    fabric, reference = make_fabric(), small_model()
    model, optimizer = fabric.setup(
        small := small_model(), torch.optim.SGD(small.parameters(), 1.0)
    )
    fabric.backward(model(batch()).sum())
    reference(batch()).sum().backward()
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_clipping_by_value_clamps() -> None:
    fabric = make_fabric()
    model, optimizer = fabric.setup(
        small := small_model(), torch.optim.SGD(small.parameters(), 1.0)
    )
    fabric.backward(model(batch()).sum())
    fabric.clip_gradients(model, optimizer, clip_val=0.01)
    assert max(p.grad.abs().max() for p in model.parameters()) == pytest.approx(0.01)


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    fabric = make_fabric()
    model, optimizer = fabric.setup(
        small := small_model(), torch.optim.SGD(small.parameters(), 1.0)
    )
    fabric.backward(model(batch()).sum() * torch.inf)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


# Everything else that Fabric asks.


def test_collectives_on_one_device_return_their_input() -> None:
    fabric = make_fabric()
    torch.testing.assert_close(fabric.all_reduce(torch.tensor(3.0)), torch.tensor(3.0))
    torch.testing.assert_close(fabric.all_gather(torch.tensor([3.0])), torch.tensor([3.0]))
    assert fabric.broadcast({"a": 1}) == {"a": 1}
    assert fabric.strategy.all_reduce("not a tensor") == "not a tensor"
    assert fabric.strategy.reduce_boolean_decision(True)
    fabric.barrier()


def test_summon_full_on_one_device_changes_nothing() -> None:
    fabric = make_fabric()
    model = fabric.setup(small_model())
    before = [p.data_ptr() for p in model.parameters()]
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    with fabric.strategy.summon_full(model):
        assert [p.data_ptr() for p in model.parameters()] == before


def test_teardown_needs_no_checkpoint_plugin() -> None:
    make_fabric().strategy.teardown()


def test_the_forward_module_reports_its_captures() -> None:
    model = make_fabric().setup(small_model())
    model(batch())
    model(batch(2))
    assert isinstance(model._forward_module, ForwardModule)
    assert [c.capture.reason for c in model._forward_module.captures] == ["first call"]


def test_a_copy_of_a_model_runs_with_weights_of_its_own() -> None:
    model = make_fabric().setup(small_model())
    x = batch()
    before = model(x)
    for _ in range(2):  # a copy of the copy as well
        copied = copy.deepcopy(model)
        assert isinstance(copied.module, nn.Sequential)
        with torch.no_grad():
            for p in copied.parameters():
                p.mul_(2)
        torch.testing.assert_close(copied(x), copied.module(x))
        torch.testing.assert_close(model(x), before)
        assert [p.unsharded_shape for p in copied.parameters()] == [
            p.shape for p in model.parameters()
        ]
    assert copied._strategy is model._strategy
