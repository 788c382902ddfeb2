"""`frozen_weights: mxfp4` keeps bytes of experts and linears: all results are those of the dequantised weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_memory
from harness.mxfp4_tensors import STACKS, gpt_oss, write_model
from harness.predicted_peaks import peak_on_a_rank, predicted_bytes
from thunder_memsave import ConfigError, load_on_setup
from thunder_memsave.checkpoints.quantized_files.mxfp4_source import Mxfp4Source
from thunder_memsave.ops.families.collectives import gathers
from thunder_memsave.sharding.quantized_parameter import Fp8ParameterError
from thunder_memsave.stored_weights.formats import MXFP4, MXFP4_TRANSPOSED
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes

ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": [f"mlp.experts.{name}" for name in STACKS],
}


def lora(model: nn.Module, *, is_empty: bool = False, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, config, low_cpu_mem_usage=is_empty)


def adapted(**settings: Any) -> Any:
    torch.manual_seed(0)
    # Not zeros: both factors get gradients.
    return lora(gpt_oss(num_hidden_layers=1), init_lora_weights=False, **settings)


class Mixture(nn.Module):
    """Experts of both layouts, and linears of whole blocks and not, after a trained factor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(96, 64, bias=False)
        self.wide = nn.Linear(64, 65, bias=False)
        self.last = nn.Linear(65, 64, bias=False)
        self.experts, self.transposed = Experts(), Experts(is_transposed=True)
        self.conv = nn.Conv1d(64, 64, 32, padding=16)
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(96))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.last(self.wide(self.first(x * self.factor))))
        x = torch.tanh(x + self.conv(x.T)[:, :-1].T)
        return (self.experts(x) + self.transposed(x)).square().mean()


class Experts(nn.Module):
    """Weights `[3, out, in]`, or transposed ones, whose outputs are no whole blocks."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.up = nn.Parameter(torch.randn((3, 64, 48) if is_transposed else (3, 48, 64)))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up if self.is_transposed else self.up.transpose(1, 2)
        return torch.bmm(x.expand(3, -1, -1), up)


class Deep(nn.Module):
    """Six stacks of experts after a trained factor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts() for _ in range(6))
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        for layer in self.layers:
            x = torch.tanh(torch.nn.functional.pad(layer(x).sum(0), (0, 16)))
        return x.square().mean()


def dequantised(model: Any) -> Any:
    """Return a copy whose frozen weights are what their bytes stand for."""
    copied = copy.deepcopy(model)
    frozen = FrozenInBytes(copied, MXFP4, data_parallel=None)
    for name in frozen.names:
        weight = copied.get_parameter(name)
        weight.data = frozen.format_of(name).round_trip(weight, name=name)
    return copied


def inputs_of(model: nn.Module, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if isinstance(model, Mixture | Deep):
        width = model.first.in_features if isinstance(model, Mixture) else 64
        return {"x": torch.randn(24, width, generator=generator)}
    ids = torch.randint(0, 64, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(module: Any, number: int) -> Tensor:
    found = module(**inputs_of(module.module, number))
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    return loss


def steps(fabric: Any, model: nn.Module) -> tuple[Any, list[Tensor]]:
    """Return the module, and losses and gradients of two steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    module, optimizer = fabric.setup(model, torch.optim.SGD(trained, lr=0.1))
    found = []
    for number in range(2):
        loss = loss_of(module, 10 * number + fabric.global_rank)
        fabric.backward(loss)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        found += [loss.detach(), *(g.data.clone() for g in grads)]
        optimizer.step()
        optimizer.zero_grad()
    assert len(module._forward_module.captures) == 1
    return module, found


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 3 and all(map(torch.equal, found, expected))


MODELS = [
    pytest.param(Mixture, id="mixture"),
    pytest.param(lambda: adapted(**EXPERTS), id="gpt-oss, LoRA on experts"),
]


@pytest.mark.parametrize("make", MODELS)
def test_losses_and_gradients_are_those_of_the_dequantised_weights(
    make: Callable[[], nn.Module],
) -> None:
    kept = make_fabric(sharding="none", frozen_weights="mxfp4", fullgraph=True)
    plain = make_fabric(sharding="none", fullgraph=True)
    _, found = steps(kept, make())
    assert equal(found, steps(plain, dequantised(make()))[1])
    assert not torch.equal(found[0], loss_of(plain.setup(make()), 0))


def test_each_weight_takes_its_bytes_and_others_stay_as_they_are() -> None:
    model = Mixture()
    frozen = FrozenInBytes(model, MXFP4, data_parallel=None)
    assert frozen.names == ["first.weight", "wide.weight", "experts.up", "transposed.up"]
    assert frozen.others == ["last"]
    sizes = {name: model.get_parameter(name).numel() for name in frozen.names}
    make_fabric(sharding="none", frozen_weights="mxfp4").setup(model)
    for name, size in sizes.items():
        assert model.get_parameter(name).nbytes == size // 2 + size // 32
    assert frozen.num_bytes == sum(size // 2 + size // 32 for size in sizes.values())
    assert model.last.weight.dtype == model.conv.weight.dtype == torch.float32
    with pytest.raises(Fp8ParameterError, match=r"'experts\.up' .* \(frozen_weights: mxfp4\)"):
        model.experts(torch.randn(2, 64))


def test_a_model_without_such_weights_is_refused() -> None:
    model = nn.Sequential(nn.Linear(65, 32), nn.Linear(32, 4)).requires_grad_(requires_grad=False)
    model[1].requires_grad_()
    with pytest.raises(
        ConfigError, match=r"is 'mxfp4', but .* no nn\.Linear of whole blocks of 32"
    ):
        make_fabric(sharding="none", frozen_weights="mxfp4").setup(model)


@pytest.mark.parametrize("policy", ["plan", "recompute_all"])
def test_predicted_peaks_are_the_measured_ones_to_the_byte(policy: str, tmp_path: Path) -> None:
    fabric = make_fabric(sharding="none", frozen_weights="mxfp4", memory={"policy": policy})
    module = fabric.setup(Mixture())
    given = inputs_of(module.module, 0)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(**given).backward()

    step()
    module.zero_grad(set_to_none=True)
    assert predicted_bytes(module, tmp_path) == measured_memory(step).peak_bytes


def num_dequantised(trace: Any) -> int:
    return sum("mxfp4" in b.sym.name for b in trace.bound_symbols)


def test_a_plan_dequantises_experts_again_where_its_budget_has_no_room() -> None:
    free: Any = make_fabric(sharding="none", frozen_weights="mxfp4")
    _, expected = steps(free, Deep())
    expert_bytes = 4 * 3 * 48 * 64
    budget = free.strategy._planned_call().profile.peak_bytes - 4 * expert_bytes
    fabric: Any = make_fabric(sharding="none", frozen_weights="mxfp4", memory={"budget": budget})
    module, found = steps(fabric, Deep())
    assert equal(found, expected)
    (compiled,) = module._forward_module.captures
    assert num_dequantised(compiled.forward_traces[-1]) == 6
    assert num_dequantised(compiled.backward_traces[-1]) >= 4
    assert fabric.strategy._planned_call().profile.peak_bytes <= budget


def loaded(fabric: Any, directory: Path) -> Any:
    with fabric.init_module(empty_init=True):
        model = gpt_oss(num_hidden_layers=1)
    load_on_setup(model, directory)
    return lora(model, is_empty=True, **ATTENTION)


def check_bytes_of_files(module: Any, directory: Path, fabric: Any) -> None:
    """Experts have the bytes of the files: quantised again, these would be others."""
    whole = fabric.strategy.get_module_state_dict(module)
    files = load_file(directory / "model.safetensors")
    names = [name for name in whole if name.endswith(STACKS)]
    assert len(names) == 2
    for name in names:
        stem = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parts = (files[f"{stem}_{part}"].flatten(1) for part in ("scales", "blocks"))
        expected = torch.cat(list(parts), dim=1)
        assert torch.equal(whole[name], expected), name
        shape = (3, 64, 192) if "gate" in name else (3, 96, 64)
        values = MXFP4_TRANSPOSED.dequantize(expected, shape, torch.float32)
        assert not torch.equal(MXFP4_TRANSPOSED.quantize(values, name=name), expected)


def check_files(directory: Path) -> None:
    settings: dict[str, Any] = {"devices": 2, "sharding": "zero3", "timeout": "2min"}
    kept = make_fabric(frozen_weights="mxfp4", **settings)
    with rows_read() as rows:
        module, found = steps(kept, loaded(kept, directory))
    first = 2 * kept.global_rank  # of three experts, rank 0 has two
    assert rows == 2 * [slice(first, first + 2).indices(3)]
    check_bytes_of_files(module, directory, kept)
    plain = make_fabric(**settings)
    reference = plain.setup(loaded(plain, directory))  # read dequantised
    values = plain.strategy.get_module_state_dict(reference)
    expected = lora(gpt_oss(num_hidden_layers=1), **ATTENTION)
    expected.load_state_dict(values)
    frozen = FrozenInBytes(expected, MXFP4, data_parallel=None)
    for name in frozen.names:
        if not name.endswith(STACKS):
            weight = expected.get_parameter(name)
            weight.data = frozen.format_of(name).round_trip(weight, name=name)
    assert equal(found, steps(plain, expected)[1])


@contextmanager
def rows_read() -> Iterator[list[tuple[int, int, int]]]:
    """Note which experts' bytes are read from files."""
    found: list[tuple[int, int, int]] = []
    own = Mxfp4Source.stored

    def stored(source: Mxfp4Source, name: str, rows: slice | None = None) -> Tensor:
        found.append((rows or slice(None)).indices(3))
        return own(source, name, rows)

    with patch.object(Mxfp4Source, "stored", stored):
        yield found


def check_mixture(sharding: str) -> None:
    """Two ranks have the bytes of one, and gather them: once, or again in backward."""
    settings: dict[str, Any] = {"devices": 2, "sharding": sharding, "timeout": "2min"}
    kept = make_fabric(frozen_weights="mxfp4", **settings)
    module, found = steps(kept, Mixture())
    assert equal(found, steps(make_fabric(**settings), dequantised(Mixture()))[1])
    whole, model = kept.strategy.get_module_state_dict(module), Mixture()
    frozen = FrozenInBytes(model, MXFP4, data_parallel=None)
    for name in frozen.names:
        values = model.get_parameter(name)
        assert torch.equal(whole[name], frozen.format_of(name).quantize(values, name=name)), name
    (compiled,) = module._forward_module.captures
    sent = [
        [w for b in trace.bound_symbols for _, w in gathers(b) if "uint8" in str(w.dtype)]
        for trace in (compiled.forward_traces[-1], compiled.backward_traces[-1])
    ]
    assert len(sent[0]) == len(frozen.names) == 4
    assert len(sent[1]) == (4 if sharding == "zero3" else 0)
    padded = 4 * 48 * 64  # of three experts, two on each rank
    assert max(w.numel for w in sent[0]) == padded // 2 + padded // 32


def check_peak() -> None:
    """The peak of a step is the predicted one."""
    fabric: Any = make_fabric(devices=2, sharding="zero3", frozen_weights="mxfp4", timeout="2min")
    module, _ = steps(fabric, Mixture())
    given = inputs_of(module.module, 0)
    measured = peak_on_a_rank(module, lambda: fabric.backward(module(**given)))
    predicted = fabric.strategy._planned_call().profile.peak_bytes
    assert given["x"].nbytes + measured == pytest.approx(predicted, rel=0.01)


@on_fabric_rank
def check_two_ranks(directory: Path) -> None:
    check_files(directory)
    for sharding in ("zero2", "zero3"):
        check_mixture(sharding)
    check_peak()


def test_files_on_two_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run_on_fabric_ranks(check_two_ranks, 2, write_model(tmp_path, gpt_oss(num_hidden_layers=1)))
