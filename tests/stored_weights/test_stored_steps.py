"""`frozen_weights`: only bytes of frozen weights are kept; all results are those of the dequantised weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.fabric import make_fabric
from harness.memory import measured_memory
from harness.models import llama, token_batch
from harness.predicted_peaks import predicted_bytes
from thunder_memsave import ConfigError, load_on_setup
from thunder_memsave.settings.frozen_format import BytesFormat, FrozenFormat
from thunder_memsave.sharding.quantized_parameter import Fp8ParameterError
from thunder_memsave.stored_weights.format import NonFiniteWeightError, StoredFormat
from thunder_memsave.stored_weights.formats import INT8, NF4, all_formats
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes

FORMATS = [pytest.param(kept_in, id=kept_in.name) for kept_in in (NF4, INT8)]


class Net(nn.Module):
    """Frozen linears of odd sizes between a trained one and an output layer, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 144)
        self.wide = nn.Linear(144, 271)
        self.narrow = nn.Linear(271, 48, bias=False)
        self.lm_head = nn.Linear(48, 16)
        for frozen in (self.wide, self.narrow, self.lm_head):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.lm_head(torch.tanh(self.narrow(torch.tanh(self.wide(x))))).square().mean()


def lora() -> nn.Module:
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(llama(1, vocab_size=112), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.to(torch.bfloat16)


MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "lora": lora}


def loss_of(module: Any, number: int) -> Tensor:
    if isinstance(module.module, Net):
        generator = torch.Generator().manual_seed(number)
        result: Tensor = module(torch.randn(8, 32, generator=generator))
        return result
    tokens = token_batch(2, 24, seed=number)
    loss: Tensor = module(input_ids=tokens, labels=tokens).loss
    return loss


def with_dequantised_weights(model: nn.Module, kept_in: StoredFormat) -> nn.Module:
    """Return a copy whose frozen weights are what their bytes stand for."""
    copied = copy.deepcopy(model)
    for name in FrozenInBytes(copied, kept_in, data_parallel=None).names:
        weight = copied.get_parameter(name)
        weight.data = kept_in.round_trip(weight, name=name)
    return copied


def set_up(model: nn.Module, frozen_weights: str | None = "nf4", **settings: Any) -> Any:
    return make_fabric(sharding="none", frozen_weights=frozen_weights, **settings).setup(model)


def trained_values(model: nn.Module, frozen_weights: str | None, **settings: Any) -> list[Tensor]:
    """Losses and gradients of three steps."""
    module = set_up(model, frozen_weights, **settings)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for number in range(3):
        loss = loss_of(module, number)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in parameters if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kept_in", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_the_dequantised_weights(
    kind: str, kept_in: StoredFormat
) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    expected = trained_values(with_dequantised_weights(model, kept_in), None)
    unquantised = trained_values(copy.deepcopy(model), None)
    found = trained_values(model, kept_in.name)
    assert len(found) == len(expected) > 6
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], unquantised[0])


@pytest.mark.parametrize("kept_in", FORMATS)
def test_a_weight_takes_its_bytes_and_nothing_else_is_kept(kept_in: StoredFormat) -> None:
    model = Net()
    made: list[Any] = []
    measured = measured_memory(lambda: made.append(set_up(model, kept_in.name)))
    for linear in (model.wide, model.narrow):
        shape = torch.Size([linear.out_features, linear.in_features])
        assert linear.weight.nbytes == kept_in.num_bytes(shape)
    trained_and_skipped = (model.first, model.lm_head)
    assert all(m.weight.dtype == torch.float32 for m in trained_and_skipped)
    assert measured.end_bytes == model.wide.weight.nbytes + model.narrow.weight.nbytes


OPERATORS = ("nf4_dequantized", "int8_dequantized")


def dequantisations(trace: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the weights that a trace dequantises."""
    found = [b for b in trace.bound_symbols if b.sym.name in OPERATORS]
    return [tuple(b.flat_proxy_outs[0].shape) for b in found]


@pytest.mark.parametrize("kept_in", FORMATS)
def test_a_weight_is_dequantised_where_it_is_read(kept_in: StoredFormat) -> None:
    module = set_up(Net(), kept_in.name)
    loss_of(module, 0)
    (compiled,) = module._forward_module.captures
    symbols = [b for b in compiled.forward_traces[-1].bound_symbols if b.flat_proxy_outs]
    names = [b.sym.name for b in symbols]
    places = [i for i, name in enumerate(names) if name == f"{kept_in.name}_dequantized"]
    assert len(places) == 2
    for place in places:
        assert names[place + 1] in ("aten_t",)
        assert "mm" in names[place + 2]


def step_of(module: Any) -> Callable[[], None]:
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(inputs).backward()

    return step


@pytest.mark.parametrize("kept_in", FORMATS)
@pytest.mark.parametrize("policy", ["plan", "recompute_all"])
def test_predicted_peaks_are_the_measured_ones_to_the_byte(
    policy: str, kept_in: StoredFormat, tmp_path: Path
) -> None:
    module = set_up(Net(), kept_in.name, memory={"policy": policy})
    step = step_of(module)
    step()
    module.zero_grad(set_to_none=True)
    assert predicted_bytes(module, tmp_path) == measured_memory(step).peak_bytes


@pytest.mark.parametrize("kept_in", FORMATS)
def test_a_plan_keeps_no_dequantised_copy_where_its_budget_has_no_room(
    kept_in: StoredFormat,
) -> None:
    free = make_fabric(sharding="none", frozen_weights=kept_in.name)
    kept = free.setup(Deep())
    kept(torch.ones(4, 128)).sum().backward()
    budget = peak_of(free) - 6 * 4 * 128 * 128
    fabric = make_fabric(sharding="none", frozen_weights=kept_in.name, memory={"budget": budget})
    module = fabric.setup(Deep())
    found = module(torch.ones(4, 128))
    found.sum().backward()
    (compiled,) = module._forward_module.captures
    assert len(dequantisations(compiled.forward_traces[-1])) == 8
    again = dequantisations(compiled.backward_traces[-1])
    assert len(again) >= 6
    assert torch.equal(module.module.scale.grad, kept.module.scale.grad)
    assert peak_of(fabric) <= budget


def peak_of(fabric: Any) -> int:
    peak_bytes: int = fabric.strategy._planned_call().profile.peak_bytes
    return peak_bytes


class Deep(nn.Module):
    """Eight frozen linears after a trained factor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(8))
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


@pytest.mark.parametrize("kept_in", FORMATS)
def test_weights_from_files_are_quantised_one_by_one(kept_in: StoredFormat, tmp_path: Path) -> None:
    model = Deep().to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    kept = kept_in.name
    fabric = make_fabric(sharding="none", precision="bf16-true", frozen_weights=kept)

    def load() -> Any:
        with fabric.init_module(empty_init=True):
            made = Deep()
        load_on_setup(made, tmp_path / "model.safetensors")
        return fabric.setup(made)

    load()
    measured = measured_memory(load)
    mapped, one = (tmp_path / "model.safetensors").stat().st_size, 128 * 128
    of_all = 8 * kept_in.num_bytes(torch.Size([128, 128]))
    assert measured.end_bytes == of_all + 2 * 128
    # One weight in bfloat16, twice, and in float32 with codes of four bytes.
    assert measured.peak_bytes - mapped < of_all + (2 + 2 + 4 * 4) * one
    found, expected = load().state_dict(), set_up(model, kept, precision="bf16-true").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kept_in", FORMATS)
@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_bytes_are_saved_and_load_bit_by_bit(
    state_dict_type: str, kept_in: StoredFormat, tmp_path: Path
) -> None:
    fabric = make_fabric(
        sharding="none", frozen_weights=kept_in.name, state_dict_type=state_dict_type
    )
    torch.manual_seed(0)
    module, other = fabric.setup(Net()), fabric.setup(Net())
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    assert saved["wide.weight"].dtype == torch.uint8
    fabric.save(tmp_path / "saved", {"model": module})
    fabric.load(tmp_path / "saved", {"model": other})
    assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
    assert torch.equal(loss_of(other, 0), loss_of(module, 0))
    with pytest.raises(RuntimeError, match=r"size mismatch for wide\.weight"):
        other.load_state_dict(Net().state_dict())


@pytest.mark.parametrize("kept_in", FORMATS)
def test_a_copied_and_a_pickled_model_keep_their_bytes_and_their_weights_shape(
    kept_in: StoredFormat,
) -> None:
    module = set_up(Net(), kept_in.name)
    expected = loss_of(module, 0)
    copied = copy.deepcopy(module)
    assert torch.equal(loss_of(copied, 0), expected)
    weight = pickle.loads(pickle.dumps(module.module.wide.weight))
    assert torch.equal(weight.data, module.module.wide.weight.data)
    assert weight.stored_weight.shape == (271, 144)


class ReadsTheWeight(nn.Module):
    """Reads a linear's weight itself, as DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(144, 272)
        self.linear.requires_grad_(False)
        self.magnitude = nn.Parameter(torch.ones(272))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.magnitude / self.linear.weight.norm(dim=1)


@pytest.mark.parametrize("kept_in", FORMATS)
def test_what_else_reads_a_weight_gets_the_dequantised_one(kept_in: StoredFormat) -> None:
    model = ReadsTheWeight()
    x, results = torch.randn(8, 144), []
    for each, kept in ((with_dequantised_weights(model, kept_in), None), (model, kept_in.name)):
        result = set_up(each, kept)(x)
        result.sum().backward()
        results.append((result, each.magnitude.grad))
    assert all(map(torch.equal, *results))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.inner, self.twin = nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 32, bias=False)
        self.requires_grad_(False)
        self.out.weight = self.embedding.weight
        self.twin.weight = self.inner.weight
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twin(self.inner(self.embedding(x) * self.scale)))


@pytest.mark.parametrize("kept_in", FORMATS)
def test_a_weight_that_an_embedding_shares_stays_and_linears_share_theirs(
    kept_in: StoredFormat,
) -> None:
    model = Tied()
    module = set_up(model, kept_in.name)
    assert model.out.weight.dtype == torch.float32
    assert model.inner.weight is model.twin.weight
    assert model.inner.weight.dtype == torch.uint8
    assert torch.isfinite(module(torch.arange(8))).all()


@pytest.mark.parametrize("kept_in", FORMATS)
def test_the_bytes_are_not_taken_for_a_weight(kept_in: StoredFormat) -> None:
    module = set_up(Net(), kept_in.name)
    linear = module.module.wide
    with pytest.raises(
        Fp8ParameterError, match=r"linear\(\) was asked to use 'wide\.weight' outsid"
    ):
        linear(torch.randn(2, 144))
    linear.weight.data = linear.weight.data.float()
    message = rf"'wide\.weight' holds bytes in {kept_in.title} .* cast to float32"
    with pytest.raises(ConfigError, match=message):
        loss_of(module, 0)


@pytest.mark.parametrize("kept_in", FORMATS)
def test_a_weight_that_is_not_finite_is_refused_by_name(kept_in: StoredFormat) -> None:
    model = Net()
    model.narrow.weight.data[3, 5] = torch.nan
    with pytest.raises(
        NonFiniteWeightError, match=r"narrow\.weight has elements that are infinite"
    ):
        set_up(model, kept_in.name)


def test_settings_without_effect_are_refused() -> None:
    trained = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(
        ConfigError, match=r"the model has no nn\.Linear, beside lm_head, whose weig"
    ):
        set_up(trained)
    with pytest.raises(ConfigError, match=r"frozen_weights is 'int8', and fp8 is set too"):
        make_fabric(frozen_weights="int8", fp8={})
    with pytest.raises(ConfigError, match="frozen_weights"):
        make_fabric(frozen_weights="nf5")


def test_every_format_that_a_setting_names_is_there() -> None:
    assert {f.setting for f in all_formats()} == set(get_args(FrozenFormat))
    assert tuple(f.name for f in all_formats()) == get_args(BytesFormat)
