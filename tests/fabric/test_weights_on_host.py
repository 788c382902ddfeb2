"""Frozen weights on the host: the same bits, the planned peak to the byte, less of the device, and clear refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.copy_engines import hostile_copies
from harness.effort import little_effort
from harness.fabric import make_fabric
from harness.host_weights import HostWeightsRun as Run
from harness.host_weights import small_host_weights
from harness.memory import measured_memory
from thunder_memsave.budget.offload import last_resort
from thunder_memsave.errors import HostMemoryError
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.settings.problems import ConfigError

ALL = {"offload_weights": ("model.layers",), "host_budget": 2**28}
SOME = {"offload_weights": ("model.layers.1", "model.layers.2"), "host_budget": 2**28}


@pytest.fixture(autouse=True)
def small_weights() -> Iterator[None]:
    """Let small weights stay on the host too."""
    with small_host_weights():
        yield


def test_steps_and_evaluation_have_the_bits_of_weights_on_the_device() -> None:
    here = Run({}).steps()
    with hostile_copies() as (engine, _):
        there = Run(ALL).steps()
        assert engine.num_begun == {"out": 0, "in": 2 * 2 * len(there.on_host)}
        with torch.no_grad():
            logits = there.model(input_ids=there.ids).logits
        assert torch.equal(logits, here.model(input_ids=here.ids).logits)
        assert there.same_as(here)
    assert len(there.on_host) == 4 * 7
    assert "on the host: " in there.strategy.explain()
    assert " of frozen weights, of layers 0-3 of model.layers" in there.strategy.explain()


def test_weights_in_few_bits_stay_there_in_few_bits() -> None:
    settings: dict[str, Any] = {"frozen_weights": "nf4"}
    here = Run({}, **settings).steps()
    with hostile_copies():
        there = Run(SOME, **settings).steps()
        assert there.same_as(here)
    assert {p.dtype for n, p in there.net.named_parameters() if n in there.on_host} == {torch.uint8}


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("frozen", ["compute", "fp8"])
def test_fp8_computes_with_weights_from_the_host(recipe: str, frozen: str) -> None:
    """The device then holds no fp8 numbers of them: each use casts what was copied, or copies numbers alone."""
    settings: dict[str, Any] = {"fp8": {"recipe": recipe, "frozen_weights": frozen}}
    here = Run({}, num_layers=2, **settings).steps()
    with hostile_copies():
        there = Run({**ALL, "policy": "keep_all"}, num_layers=2, **settings).steps()
        with torch.no_grad():
            logits = there.model(input_ids=there.ids).logits
    assert torch.equal(logits, here.model(input_ids=here.ids).logits)
    assert there.same_as(here)
    on_host = [p for n, p in there.net.named_parameters() if n in there.on_host]
    assert {p.dtype for p in on_host} == {
        torch.float32 if frozen == "compute" else torch.float8_e4m3fn
    }
    if recipe == "current":  # histories of the other recipe are updated by the optimizer's step
        call = there.strategy._planned_call()
        assert call is not None
        held_bytes = sum(call.program.storages[s].nbytes for s in call.program.held)
        assert_peak(there, held_bytes + call.memory.other_bytes)


def bytes_on_device(run: Run) -> int:
    """Return the bytes of parameters, buffers and the batch on the device, without fp8."""
    here = [p for p in run.net.parameters() if place_of(p) is None]
    return sum(t.nbytes for t in (*here, *run.net.buffers(), run.ids))


def assert_peak(run: Run, held_bytes: int) -> None:
    """Compare the planned peak of a step with the measured one, beside bytes that are held before."""

    def step() -> None:
        output = run.model(input_ids=run.ids, labels=run.ids)  # it is held until backward ends
        run.fabric.backward(output.loss)
        run.optimizer.step()

    assert run.peak_bytes == held_bytes + measured_memory(step).peak_bytes


class OtherStrides(nn.Module):
    """Frozen weights in other orders of memory, one with gaps, and a trained layer before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(64, 64)
        self.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.randn(64, 64).t())
        self.gaps = nn.Parameter(torch.randn(64, 128)[:, ::2])
        for p in (*self.conv.parameters(), self.transposed, self.gaps):
            p.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        images = (self.trained(x) @ self.transposed @ self.gaps).view(-1, 64, 8, 8)
        return self.conv(images)


def test_weights_keep_their_strides() -> None:
    results = []
    for memory in ({}, {"offload_weights": ("*",), "host_budget": 2**28}):
        fabric = make_fabric(memory=memory, sharding="none")
        net = OtherStrides()
        strides = [p.stride() for p in net.parameters()]
        model, _ = fabric.setup(net, torch.optim.SGD(net.trained.parameters(), lr=0.1))
        output = model(torch.linspace(-1, 1, 128 * 64).view(128, 64))
        fabric.backward(output.square().mean())
        assert [p.stride() for p in net.parameters()] == strides
        assert net.trained.weight.grad is not None
        results.append((output.stride(), output.detach(), net.trained.weight.grad))
    assert place_of(net.conv.weight) is not None
    assert place_of(net.transposed) is not None
    assert place_of(net.gaps) is None  # a copy of it would have none
    here, there = results
    assert here[0] == there[0]
    assert all(map(torch.equal, here[1:], there[1:]))


def test_meta_weights_are_filled_on_the_host() -> None:
    def on_meta(module: nn.Module) -> None:
        module.to("meta")

    torch.manual_seed(3)
    here = Run({}, change=on_meta).steps()
    torch.manual_seed(3)
    there = Run(SOME, change=on_meta).steps()
    assert there.same_as(here)
    assert len(there.on_host) == 2 * 7


@pytest.mark.parametrize("policy", [{"policy": "recompute_all"}, {}])
def test_the_peak_is_the_planned_one_to_the_byte(policy: dict[str, Any]) -> None:
    here = Run(policy).steps(1)
    there = Run({**ALL, **policy}).steps(1)
    assert there.same_as(here)
    assert_peak(here, bytes_on_device(here))
    assert_peak(there, bytes_on_device(there))
    assert there.peak_bytes < here.peak_bytes


def test_a_budget_that_the_weights_alone_exceed_is_kept() -> None:
    here = Run({}, num_layers=8).steps()
    weights = sum(p.nbytes for p in here.net.parameters())
    budget = weights - 1
    there = Run(
        {"offload_weights": ("*.layers.*",), "host_budget": 2**28, "budget": budget}, num_layers=8
    ).steps()
    assert there.same_as(here)
    assert there.peak_bytes <= budget


def test_an_error_in_the_middle_leaves_weights_as_they_are() -> None:
    with hostile_copies():
        run = Run(ALL).steps(1)
        with pytest.raises(IndexError):
            run.model(input_ids=torch.full((2, 32), 10**6), labels=run.ids)
        assert run.steps(1).same_as(Run({}).steps(2))


def test_files_have_the_weights_as_before(tmp_path: Path) -> None:
    here, there = Run({}).steps(), Run(SOME).steps()
    for name, run in (("here", here), ("there", there)):
        run.fabric.save(tmp_path / name, {"model": run.model})
    other = Run(
        SOME, change=lambda module: nn.init.zeros_(module.model.layers[1].mlp.up_proj.weight)
    )
    other.fabric.load(tmp_path / "here", {"model": other.model})
    other.gradients = here.gradients
    assert other.same_as(there)
    assert len(other.on_host) == 2 * 7


@contextmanager
def elsewhere() -> Iterator[None]:
    """Take the CPU for a device that is not the host."""
    with patch.object(last_resort, "is_host", lambda _: False):
        yield


@pytest.mark.parametrize(
    ("fp8", "num_layers", "part"),
    [(None, 4, 0.82), ({"recipe": "current", "frozen_weights": "fp8"}, 6, 0.84)],
)
def test_as_few_layers_as_it_takes_go_to_the_host_where_nothing_else_fits(
    fp8: Any, num_layers: int, part: float, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"num_layers": num_layers} | ({} if fp8 is None else {"fp8": fp8})
    here = Run({}, **settings).steps(2)
    least = Run({"policy": "recompute_all"}, **settings).steps(1).peak_bytes
    budget = int(part * least)
    caplog.set_level(logging.INFO)
    with elsewhere(), hostile_copies(), little_effort():
        found = Run({"budget": budget, "host_budget": 2**28}, **settings).steps(2)
        assert found.same_as(here)
    assert found.peak_bytes <= budget
    on_host = {name.split(".")[2] for name in found.on_host}
    assert 1 <= len(on_host) <= num_layers - (fp8 is None)
    assert "nothing fits with all frozen weights on the device" in caplog.text


def test_the_host_s_memory_is_a_limit() -> None:
    with pytest.raises(
        HostMemoryError, match=r"memory.offload_weights keeps on the host take [\d,]+ bytes there"
    ):
        Run({**ALL, "host_budget": 10_000})


@pytest.mark.parametrize(
    ("memory", "arguments", "message"),
    [
        ({"offload_weights": ("model.layer.*",)}, {}, "has 'model.layer.*', which names no module"),
        (
            {"offload_weights": ("model.norm",)},
            {},
            "names modules without frozen weights of at least",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    memory: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Run(memory, **arguments)
    assert message in str(error.value)
