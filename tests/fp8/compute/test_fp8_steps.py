"""Scaling state: one per linear, changed by optimizer steps alone, the same on all ranks, resumed bit by bit."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.fp8_linears import EagerTwin, fp8_module, linears_of, state_of
from thunder_memsave import ConfigError, checkpoint
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.fp8.compute import backends
from thunder_memsave.fp8.kernels import te_backend, torch_backend, torch_support
from thunder_memsave.sharding.same_on_all_ranks import RankMismatchError

FP8 = {"amax_history_len": 4}
PARTS = ("backward_amax_history", "backward_scale", "forward_amax_history", "forward_scale")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.frozen = nn.Linear(48, 32, bias=False)
        self.frozen.requires_grad_(False)
        self.lm_head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batch(number: int) -> Tensor:
    """Later ones are larger."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 32, generator=generator) * (1 + number)


def setup(fabric: Fabric) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(trained(model), lr=0.01, momentum=0.9)
    return fabric.setup(model, optimizer)


def scaling(model: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in model.state_dict().items() if "fp8_scaling" in n}


def backward(fabric: Fabric, model: Any, number: int) -> Tensor:
    loss: Tensor = model(batch(number)).square().mean()
    fabric.backward(loss)
    return loss.detach()


def assert_equal_state(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_every_fp8_linear_has_one_state_from_the_start() -> None:
    model, _ = setup(make_fabric(sharding="none", fp8=FP8))
    names = [f"{linear}.fp8_scaling.{part}" for linear in ("first", "frozen") for part in PARTS]
    assert sorted(scaling(model)) == names
    assert set(names) <= set(model.state_dict())
    for rows in (8, 16):
        model(torch.randn(rows, 32)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 32))
    forward = model._forward_module
    assert len(forward.captures) == 3
    assert sorted(scaling(model)) == names


def test_the_state_is_updated_once_for_each_step_by_fabric_or_by_torch_alone() -> None:
    fabric = make_fabric(sharding="none", fp8=FP8)
    model, optimizer = setup(fabric)
    state = model.first.fp8_scaling
    largest = []
    for number in range(3):
        backward(fabric, model, number)
        largest.append(batch(number).abs().max())
        assert state.forward_amax_history[0, 0] == largest[-1]
        by_torch_alone = number == 1
        (optimizer.optimizer if by_torch_alone else optimizer).step()
        optimizer.zero_grad()
    assert state.forward_amax_history[:, 0].tolist() == [0.0, *largest]
    assert state.forward_scale[0] == largest[-1].reciprocal() * 448


def test_other_optimizers_and_steps_without_a_forward_change_nothing() -> None:
    fabric = make_fabric(sharding="none", fp8=FP8)
    model, optimizer = setup(fabric)
    other = nn.Linear(2, 2)
    backward(fabric, model, 0)
    other(torch.ones(2)).sum().backward()
    before = scaling(model)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert_equal_state(scaling(model), before)
    optimizer.step()
    after = scaling(model)
    assert not torch.equal(after["first.fp8_scaling.forward_scale"], torch.ones(2))
    optimizer.step()
    assert_equal_state(scaling(model), after)


def test_a_step_that_is_left_out_for_its_gradients_updates_the_state_too() -> None:
    fabric = make_fabric(sharding="none", fp8=FP8, nonfinite_gradients="skip")
    model, optimizer = setup(fabric)
    backward(fabric, model, 0)
    model.lm_head.weight.grad.fill_(torch.nan)
    before = model.lm_head.weight.clone()
    optimizer.step()
    assert torch.equal(model.lm_head.weight, before)
    assert model.first.fp8_scaling.forward_amax_history[-1, 0] == batch(0).abs().max()


def make(**options: Any) -> CompiledModule:
    torch.manual_seed(0)
    return fp8_module(Net(), skip_modules=("lm_head",), **options)


def run(module: CompiledModule, number: int) -> Tensor:
    loss = module(batch(number)).square().mean()
    assert isinstance(loss, Tensor)
    return loss


def gradients(module: CompiledModule) -> list[Tensor]:
    return [p.grad.clone() for p in trained(module.module) if p.grad is not None]


def scaled(module: CompiledModule) -> CompiledModule:
    """After one step, so that scales are not 1."""
    run(module, 0).backward()
    linears_of(module).update(None)
    module.zero_grad()
    return module


def test_the_order_of_micro_batches_changes_no_bit() -> None:
    in_turn, at_once = scaled(make()), scaled(make())
    for number in (1, 2):
        run(in_turn, number).backward()
    losses = [run(at_once, number) for number in (1, 2)]
    for loss in losses:
        loss.backward()
    assert_equal_state(state_of(linears_of(at_once)), state_of(linears_of(in_turn)))
    for ours, theirs in zip(gradients(at_once), gradients(in_turn), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_a_second_backward_gives_the_same_bits_and_changes_no_state(recipe: str) -> None:
    module = scaled(make(recipe=recipe))
    loss = run(module, 1)
    loss.backward(retain_graph=True)
    first, state = gradients(module), state_of(linears_of(module))
    for _ in range(2):
        module.zero_grad()
        loss.backward(retain_graph=True)
        for ours, theirs in zip(gradients(module), first, strict=True):
            assert torch.equal(ours, theirs)
        assert_equal_state(state_of(linears_of(module)), state)


def test_in_a_recomputed_region_bits_and_state_are_the_same() -> None:
    plain, again = scaled(make()), scaled(make())
    run(plain, 1).backward()
    loss = checkpoint(run, again, 1)
    for retain_graph in (True, False):
        again.zero_grad()
        loss.backward(retain_graph=retain_graph)
        for ours, theirs in zip(gradients(again), gradients(plain), strict=True):
            assert torch.equal(ours, theirs)
    for module in (plain, again):
        linears_of(module).update(None)
    assert_equal_state(state_of(linears_of(again)), state_of(linears_of(plain)))


def raises(*_: Any) -> None:
    raise KeyError("mine")


def test_an_exception_in_backward_frees_what_was_saved_and_leaves_scales_as_they_were() -> None:
    whole, failed = scaled(make()), scaled(make())
    before = {n: t for n, t in state_of(linears_of(failed)).items() if n.endswith("scale")}
    of_linears = (
        linear.read(part)
        for linear in linears_of(failed).by_name.values()
        for part in linear.parts(training=True, transposed=True)
    )
    there = {t.data_ptr() for t in (*failed.parameters(), *failed.buffers(), *of_linears)}
    saved: list[weakref.ref[Tensor]] = []

    def watched(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in there:
            saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(watched, lambda tensor: tensor):
        loss = run(failed, 1)
    assert sum(r() is not None for r in saved) > 3
    with patch.object(torch_backend, "gemm", raises), suppress(KeyError):
        loss.backward()
    assert not any(r() is not None for r in saved)
    after = state_of(linears_of(failed))
    assert all(torch.equal(after[name], scale) for name, scale in before.items())
    # The same step, as if nothing had been: an amax that was recorded counts once.
    for module in (whole, failed):
        module.zero_grad()
        run(module, 1).backward()
        linears_of(module).update(None)
    for ours, theirs in zip(gradients(failed), gradients(whole), strict=True):
        assert torch.equal(ours, theirs)
    assert_equal_state(state_of(linears_of(failed)), state_of(linears_of(whole)))


def test_evaluation_changes_no_state() -> None:
    module = scaled(make())
    before = state_of(linears_of(module))
    with torch.no_grad():
        run(module, 5)
        module.eval()
        run(module, 6)
    assert_equal_state(state_of(linears_of(module)), before)
    linears_of(module).update(None)
    assert_equal_state(state_of(linears_of(module)), before)


def test_gradients_of_a_module_in_eval_mode_change_no_state() -> None:
    module = scaled(make())
    before = state_of(linears_of(module))
    run(module, 1)  # captured in training mode
    taken = state_of(linears_of(module))
    module.eval()
    run(module, 9).backward()
    assert_equal_state(state_of(linears_of(module)), taken)
    assert module.captures[0].capture.reason == "train or eval mode of the module changed"
    module.train()
    run(module, 9).backward()
    assert len(module.captures) == 2
    later = state_of(linears_of(module))
    assert later["first.forward_amax_history"][0, 0] == batch(9).abs().max()
    assert not torch.equal(
        before["first.forward_amax_history"], later["first.forward_amax_history"]
    )


def test_steps_in_eval_mode_alone_take_no_new_scales_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = make().eval()
    before = state_of(linears_of(module))
    run(module, 3).backward()
    assert "Net computes gradients in eval mode, where fp8 records no amax" in caplog.text
    linears_of(module).update(None)
    assert_equal_state(state_of(linears_of(module)), before)
    assert all(bool(g.any()) for g in gradients(module))


def test_a_run_may_begin_with_an_evaluation_in_inference_mode() -> None:
    module = make()
    with torch.inference_mode():
        run(module, 0)
    run(module, 0).backward()
    assert all(bool(g.any()) for g in gradients(module))


def test_loaded_frozen_weights_are_requantised() -> None:
    fabric = make_fabric(sharding="none", fp8=FP8)
    model, _ = setup(fabric)
    before = model(batch(0)).detach()
    weights = fabric.strategy.get_module_state_dict(model)
    weights["frozen.weight"] = -weights["frozen.weight"]
    fabric.strategy.load_module_state_dict(model, weights)
    after = model(batch(0)).detach()
    bias = model.lm_head.bias.detach()
    torch.testing.assert_close(after - bias, bias - before)  # tanh is odd


def test_states_are_those_of_an_eager_model_over_many_steps() -> None:
    module = make()
    twin = EagerTwin(module)
    for number in range(8):
        run(module, number).backward()
        twin(batch(number)).square().mean().backward()
        linears_of(module).update(None)
        twin.linears.update(None)
        assert_equal_state(state_of(linears_of(module)), state_of(twin.linears))


def test_a_backward_after_the_step_of_its_forward_is_refused_by_torch() -> None:
    module = make()
    loss = run(module, 0)
    linears_of(module).update(None)
    with pytest.raises(
        RuntimeError, match=r"(?s)modified by an inplace operation.*\(with new scales of fp8\)"
    ):
        loss.backward()


def test_a_copy_has_state_of_its_own_and_computes_the_same() -> None:
    fabric = make_fabric(sharding="none", fp8=FP8)
    model, _ = setup(fabric)
    backward(fabric, model, 0)
    copied = copy.deepcopy(model)
    before = scaling(model)
    assert torch.equal(copied(batch(1)), model(batch(1)))
    copied(batch(9)).sum().backward()
    expected = {n: v for n, v in before.items() if "backward" in n}
    assert_equal_state({n: v for n, v in scaling(model).items() if n in expected}, expected)
    largest = copied.first.fp8_scaling.forward_amax_history[0, 0].clone()
    assert largest > model.first.fp8_scaling.forward_amax_history[0, 0]
    torch.optim.SGD(trained(copied), lr=0.1).step()
    assert copied.first.fp8_scaling.forward_amax_history[-1, 0] == largest
    assert model.first.fp8_scaling.forward_amax_history[0, 0] == batch(1).abs().max()


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    fabric = make_fabric(sharding="none", fp8=FP8)
    model, optimizer = setup(fabric)
    backward(fabric, model, 0)
    optimizer.step()
    weight = weakref.ref(model.frozen.weight)
    del model, optimizer
    fabric._models_setup = 0
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fp8": {"skip_modules": ["lm_head", "first", "frozen"]}},
            "fp8 is set, but 0 of 3 linears run in fp8; not first: skip_modules has 'first'",
        ),
        (
            {"fp8": {"skip_modules": ["lmhead"]}},
            "fp8.skip_modules has 'lmhead', which names no module of this model",
        ),
    ],
)
def test_settings_that_have_no_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        setup(make_fabric(sharding="none", **settings))
    assert message in str(error.value)


def test_a_linear_that_has_something_of_the_states_name_is_refused() -> None:
    model = Net()
    model.first.fp8_scaling = nn.Identity()
    with pytest.raises(ConfigError, match="in its attribute 'fp8_scaling', but has a Identity"):
        make_fabric(sharding="none", fp8=FP8).setup(model)


def checkpointed(fabric: Fabric, path: Path) -> None:
    """Four steps give the same bits as two, a checkpoint, another model that loads it, and two more."""
    runs = []
    for resumes in (False, True):
        model, optimizer = setup(fabric)
        losses = []
        for number in range(4):
            if resumes and number == 2:
                fabric.save(path, {"model": model, "optimizer": optimizer})
                model, optimizer = setup(fabric)
                fabric.load(path, {"model": model, "optimizer": optimizer})
            losses.append(backward(fabric, model, 2 * number + fabric.global_rank))
            optimizer.step()
            optimizer.zero_grad()
        runs.append((losses, {**fabric.strategy.get_module_state_dict(model), **scaling(model)}))
    (losses, state), (resumed_losses, resumed) = runs
    assert all(map(torch.equal, losses, resumed_losses))
    assert_equal_state(resumed, state)


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_a_run_resumes_bit_by_bit(state_dict_type: str, tmp_path: Path) -> None:
    fabric = make_fabric(sharding="none", fp8=FP8, state_dict_type=state_dict_type)
    checkpointed(fabric, tmp_path / "checkpoint")


def test_one_rank_has_the_scales_of_all_with_reduce_amax_or_without() -> None:
    found = []
    for reduce_amax in (True, False):
        fabric = make_fabric(sharding="none", fp8={**FP8, "reduce_amax": reduce_amax})
        model, _ = after_a_step(fabric)
        found.append(scaling(model))
    assert_equal_state(*found)


def test_two_ranks(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path)


@on_fabric_rank
def check_ranks(directory: Path) -> None:
    check_the_ranks_have_one_state(make_fabric(devices=2, sharding="zero2", fp8=FP8))
    zero3 = make_fabric(devices=2, sharding="zero3", fp8=FP8)
    checkpointed(zero3, directory / "checkpoint")
    check_a_second_backward(zero3)
    check_a_backend_that_one_rank_cannot_use(zero3)
    check_ranks_that_would_choose_other_backends()
    message = r"fp8\.reduce_amax is false, and there are 2 ranks, each of which .*; leave reduce_amax out, which is tr"
    with pytest.raises(ConfigError, match=message):
        make_fabric(devices=2, sharding="zero3", fp8={**FP8, "reduce_amax": False})


def check_a_backend_that_one_rank_cannot_use(fabric: Fabric) -> None:
    """The other rank stops with the reason instead of waiting for the timeout."""
    is_bad = fabric.global_rank == 1
    reason = "TransformerEngine cannot be loaded" if is_bad else None
    with (
        patch.object(torch_support, "why_not", return_value=reason),
        pytest.raises(ConfigError if is_bad else OtherRankError, match="cannot be loaded"),
    ):
        setup(fabric)


def check_ranks_that_would_choose_other_backends() -> None:
    fabric = make_fabric(devices=2, sharding="zero3", fp8={**FP8, "backend": "auto"})
    chosen = ("transformer_engine", "torch")[fabric.global_rank]
    message = (
        r"^rank 1 disagrees with rank 0 before training starts: fp8.backend is 'transformer_engine' on rank 0 and "
        r"'torch' on rank 1; install the same TransformerEngine on every rank, or set fp8.backend to 'torch'\.$"
    )
    with (
        patch.object(backends, "_best", return_value=chosen),
        patch.object(te_backend, "why_not", return_value=None),
        pytest.raises(RankMismatchError, match=message),
    ):
        setup(fabric)


def after_a_step(fabric: Fabric) -> tuple[Any, Any]:
    model, optimizer = setup(fabric)
    backward(fabric, model, fabric.global_rank)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def check_the_ranks_have_one_state(fabric: Fabric) -> None:
    """Their state is that of one process that sees both batches in one step."""
    model, _ = after_a_step(fabric)
    alone = make()
    for number in (0, 1):
        run(alone, number).backward()
    linears_of(alone).update(None)
    assert_equal_state(
        {n.replace("fp8_scaling.", ""): v for n, v in scaling(model).items()},
        state_of(linears_of(alone)),
    )


def check_a_second_backward(fabric: Fabric) -> None:
    model, _ = after_a_step(fabric)
    loss = model(batch(fabric.global_rank)).square().mean()
    found = []
    for _ in range(2):
        model.zero_grad()
        fabric.backward(loss, retain_graph=True)
        grads = [p.grad.clone() for p in trained(model) if p.grad is not None]
        found.append([*grads, *scaling(model).values()])
    assert all(map(torch.equal, *found))
    assert dist.get_world_size() == 2
