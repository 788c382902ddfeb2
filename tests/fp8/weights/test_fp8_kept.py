"""`frozen_weights: fp8`: only fp8 numbers of weights are kept, and all results are those of weights cast once."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness.fabric import make_fabric
from harness.fp8_linears import fp8_module, linears_of, ops, results
from harness.memory import measured_memory
from harness.models import llama, token_batch
from thunder_memsave import ConfigError, load_on_setup
from thunder_memsave.budget.extract import profiles
from thunder_memsave.budget.running_program import program
from thunder_memsave.checkpoints.module_state import StateMismatchError
from thunder_memsave.fp8.compute.operators import quantize_frozen
from thunder_memsave.fp8.recipe import Recipe
from thunder_memsave.fp8.weights.loaded import SCALE_NAME, weight_of_scale
from thunder_memsave.fp8.weights.rows import Rows
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.measure.scratch import MeasuredScratch
from thunder_memsave.planner.simulate import simulate
from thunder_memsave.sharding.quantized_parameter import Fp8Parameter, Fp8ParameterError
from thunder_memsave.sharding.rows import own_rows, shard_module
from thunder_memsave.sharding.sharded_parameter import ShardedParameter

RECIPES = ("delayed", "current", "block")
FP8 = torch.float8_e4m3fn


class Net(nn.Module):
    """Frozen linears of odd sizes between trained ones; the last one does not run in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 144)
        self.wide = nn.Linear(144, 272)
        self.narrow = nn.Linear(272, 48, bias=False)
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


def batch(module: Any, number: int) -> dict[str, Tensor]:
    if "lm_head" in dict(module.module.named_children()):
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(8, 32, generator=generator)}
    tokens = token_batch(2, 24, seed=number)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(module: Any, number: int) -> Tensor:
    return loss_in(module(**batch(module, number)))


def loss_in(result: Any) -> Tensor:
    loss = result if isinstance(result, Tensor) else result.loss
    assert isinstance(loss, Tensor)
    return loss


def trained_values(
    model: nn.Module, *, backend: Any = "torch", recipe: str, frozen_weights: str
) -> list[Tensor]:
    """Losses and gradients of three steps."""
    module = fp8_module(
        copy.deepcopy(model), backend=backend, recipe=recipe, frozen_weights=frozen_weights
    )
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for number in range(3):
        loss = loss_of(module, number)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in parameters if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        linears_of(module).update(None)
    return found


def assert_same_training(model: nn.Module, recipe: str, backend: str = "torch") -> None:
    expected, found = (
        trained_values(model, backend=backend, recipe=recipe, frozen_weights=kept)
        for kept in ("compute", "fp8")
    )
    assert len(found) == len(expected) > 6
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "recipe"), [*(("net", recipe) for recipe in RECIPES), ("lora", "delayed")]
)
def test_training_is_that_of_weights_that_were_cast_once(kind: str, recipe: str) -> None:
    torch.manual_seed(0)
    assert_same_training(MODELS[kind](), recipe)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_of_weights_that_were_cast_once_with_emulated_kernels(recipe: str) -> None:
    torch.manual_seed(0)
    assert_same_training(Net(), recipe, backend="transformer_engine")


def test_the_graph_reads_the_numbers_and_transposes_them_where_backward_reads_them() -> None:
    module = fp8_module(Net(), frozen_weights="fp8")
    loss_of(module, 0)
    (compiled,) = module.captures
    forward, backward = compiled.forward_traces[-1], compiled.backward_traces[-1]
    assert len(ops(forward, "quantize")) == 4 + 1  # inputs, and the weight that is trained
    assert not ops(forward, "transpose")
    transposed = results(backward, "transpose")
    assert transposed[144, 272] == transposed[272, 48] == 1
    names = [a.name for a in forward.args]
    assert sum(name.endswith("weight_scale_inv") for name in names) == 3
    assert not any(
        name.endswith(("_weight", "weight_transposed")) for name in names if "fp8" in name
    )


def test_linears_that_are_skipped_trained_or_tied_to_others_keep_their_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.inner = nn.Linear(16, 16)
            self.out = nn.Linear(16, 32, bias=False)
            self.requires_grad_(False)
            self.out.weight = self.embedding.weight
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(self.embedding(x) * self.scale))

    model = Tied()
    fp8_module(model, frozen_weights="fp8")
    assert model.out.weight.dtype == torch.float32
    assert model.inner.weight.dtype == FP8
    net = Net()
    fp8_module(net, frozen_weights="fp8", skip_modules=["lm_head", "narrow"])
    kept = {name: p.dtype for name, p in net.named_parameters() if p.dim() == 2}
    expected = dict.fromkeys(kept, torch.float32)
    assert kept == {**expected, "wide.weight": FP8}


def test_linears_that_share_a_weight_share_its_numbers_and_their_scale() -> None:
    class Shared(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
            self[1].requires_grad_(False)
            self[2].requires_grad_(False)
            self[2].weight = self[1].weight

    torch.manual_seed(0)
    model = Shared()
    reference = fp8_module(copy.deepcopy(model), frozen_weights="compute")
    module = fp8_module(model, frozen_weights="fp8")
    assert model[1].weight is model[2].weight
    x = torch.randn(8, 32)
    assert torch.equal(module(x), reference(x))
    assert module.state_dict()[f"module.2.{SCALE_NAME}.scale_inv"].shape == (1,)


class ReadsTheWeight(nn.Module):
    """Reads a linear's weight itself, as DoRA does."""

    def __init__(self, seen: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(144, 272)
        self.linear.requires_grad_(False)
        self.magnitude = nn.Parameter(torch.ones(272))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight if self.seen is None else self.seen
        return self.linear(x) * self.magnitude / weight.norm(dim=1)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_what_else_reads_a_weight_gets_what_its_numbers_stand_for(recipe: Any) -> None:
    torch.manual_seed(0)
    model = ReadsTheWeight()
    reference = copy.deepcopy(model)
    whole = recipe_named(recipe)
    numbers, scale_inv = quantize_frozen("torch", whole, reference.linear.weight.detach())
    factors = scale_inv
    if recipe == "block":
        factors = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:272, :144]
    reference.seen = numbers.float() * factors
    x = torch.randn(8, 144, requires_grad=True)
    found = []
    for each, kept in ((model, "fp8"), (reference, "compute")):
        result = fp8_module(each, recipe=recipe, frozen_weights=kept)(x)
        found.append((result, *torch.autograd.grad(result.sum(), [x, each.magnitude])))
    assert all(map(torch.equal, *found))


def recipe_named(name: Any) -> Recipe:
    return Recipe(
        name=name,
        fp8_format="HYBRID",
        amax_history_len=4,
        amax_compute_algo="max",
        margin=0,
        reduce_amax=True,
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_ranks_are_the_numbers_of_the_whole(
    num_ranks: int, recipe: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(272, 144, dtype=dtype)
    weight[3, 5] = torch.nan
    weight[200:] *= 100
    whole = recipe_named(recipe)
    ranks = [rows_of(weight, rank, num_ranks) for rank in range(num_ranks)]
    amax = torch.stack([own.amax(whole) for own in ranks]).amax(0)
    expected, expected_scale = quantize_frozen("torch", whole, weight)
    found = [own.quantized(amax, whole) for own in ranks]
    numbers = torch.cat([values.view(torch.uint8) for values, _ in found])
    assert torch.equal(numbers[:272], expected.view(torch.uint8))
    assert not numbers[272:].any()
    assert all(torch.equal(scale, expected_scale) for _, scale in found)


class _OneOf:
    """A stand-in for `DataParallel`, with the attributes that decide on rows."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.shards = rank, world_size, True


def rows_of(weight: Tensor, rank: int, num_ranks: int) -> Rows:
    owner = nn.Module()
    owner.weight = nn.Parameter(weight.clone(), requires_grad=False)
    ranks: Any = _OneOf(rank, num_ranks)
    shard_module(owner, ranks if num_ranks > 1 else None)
    assert isinstance(owner.weight, ShardedParameter) is (num_ranks > 1)
    assert num_ranks == 1 or owner.weight.shape[0] == own_rows(weight.shape, ranks).num_rows
    return Rows.of(owner.weight, torch.device("cpu"))


def test_half_the_bytes_of_bfloat16_are_left_and_the_weights_are_gone() -> None:
    fabric = make_fabric(sharding="none", precision="bf16-true", fp8={"frozen_weights": "fp8"})
    made: list[Any] = []

    def set_up() -> Any:
        made.append(fabric.setup(Net()))
        return made[-1]

    measured = measured_memory(set_up)
    model = made.pop().module
    frozen = sum(m.weight.numel() for m in (model.wide, model.narrow))
    others = sum(p.numel() for p in model.parameters()) - frozen
    parameters, state = (
        sum(p.nbytes for p in model.parameters()),
        [b.nbytes for b in model.buffers()],
    )
    assert parameters == 2 * others + frozen
    assert measured.end_bytes == parameters + sum(state)


def test_a_weight_is_gone_when_its_numbers_are_there() -> None:
    model = Net()
    before = [StorageWeakRef(m.weight.untyped_storage()) for m in (model.wide, model.first)]
    fp8_module(model, frozen_weights="fp8")
    assert [storage.expired() for storage in before] == [True, False]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> OpProfiles:
    return profiles(scratch=MeasuredScratch(directory=tmp_path_factory.mktemp("scratch")))


@pytest.mark.parametrize("recipe", RECIPES)
def test_predicted_peaks_are_the_measured_ones_to_the_byte(recipe: str, known: OpProfiles) -> None:
    module = fp8_module(Net(), recipe=recipe, frozen_weights="fp8")
    loss_of(module, 0)
    (compiled,) = module.captures
    found = program(
        compiled.forward_traces[-1], compiled.backward_traces[-1], known=known, differentiated={0}
    )
    constant_bytes = sum(found.storages[s].nbytes for s in found.held)

    inputs = batch(module, 0)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        result = module(**inputs)  # the caller holds all of it
        loss_in(result).backward()

    step()
    module.zero_grad(set_to_none=True)
    assert simulate(found).peak_bytes - constant_bytes == measured_memory(step).peak_bytes


class Files(nn.Module):
    """Many weights of one size."""

    def __init__(self, num_linears: int = 12) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(num_linears))
        self.linears.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x)) * self.scale
        return x


def test_weights_from_files_are_cast_one_by_one(tmp_path: Path) -> None:
    model = Files().to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    expected = fp8_module(model, recipe="current", frozen_weights="fp8")
    settings = {"frozen_weights": "fp8", "recipe": "current"}
    fabric = make_fabric(sharding="none", precision="bf16-true", fp8=settings)

    def set_up() -> Any:
        with fabric.init_module(empty_init=True):
            made = Files()
        load_on_setup(made, tmp_path / "model.safetensors")
        return fabric.setup(made)

    set_up()
    measured = measured_memory(set_up)
    mapped, one = (tmp_path / "model.safetensors").stat().st_size, 256 * 256
    # All numbers, and of one weight what was read, and its cast in float32, twice.
    assert measured.peak_bytes - mapped < (12 + 2 + 2 * 4 + 1) * one
    assert measured.end_bytes < (12 + 1) * one
    found = set_up().state_dict()
    for name, value in expected.module.state_dict().items():
        if name.endswith("weight"):
            assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_weights_that_are_initialised_are_kept_in_fp8_too() -> None:
    fabric = make_fabric(sharding="none", fp8={"frozen_weights": "fp8", "amax_history_len": 4})
    with fabric.init_module(empty_init=True):
        made = Net()
    module = fabric.setup(made)
    assert made.wide.weight.dtype == FP8
    assert torch.isfinite(loss_of(module, 0))


def kept_net(**arguments: Any) -> tuple[Any, Any]:
    fabric = make_fabric(sharding="none", fp8={"frozen_weights": "fp8", "amax_history_len": 4})
    torch.manual_seed(arguments.get("seed", 0))
    return fabric, fabric.setup(Net())


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_what_is_saved_are_numbers_and_scales_and_it_loads_bit_by_bit(
    state_dict_type: str, tmp_path: Path
) -> None:
    fabric, module = kept_net()
    fabric.strategy.config = copy.copy(fabric.strategy.config)
    object.__setattr__(fabric.strategy.config, "state_dict_type", state_dict_type)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    assert saved["wide.weight"].dtype == FP8
    assert saved["wide.fp8_weight.scale_inv"].dtype == torch.float32
    fabric.save(tmp_path / "saved", {"model": module})
    other, loaded = kept_net(seed=1)
    other.load(tmp_path / "saved", {"model": loaded})
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.view(torch.uint8), saved[name].view(torch.uint8)), name
    loss = loss_of(module, 0)
    assert torch.equal(loss_of(loaded, 0), loss)
    _, third = kept_net(seed=2)
    third.load_state_dict(saved)
    assert torch.equal(loss_of(third, 0), loss)


def test_weights_and_fp8_numbers_are_not_taken_for_each_other(tmp_path: Path) -> None:
    fabric, module = kept_net()
    weights = Net().state_dict()
    message = (
        r"wide\.weight: dtype torch\.float32 was given, and the model keeps only fp8 numbers of it .*, whose scale is "
        r"in fp8_weight\.scale_inv; load what such a model saved, or give torch\.float32 weights to load_on_setup\(\) "
    )
    with pytest.raises(ValueError, match=message):
        module.load_state_dict({**module.state_dict(), **weights})
    torch.save(weights, tmp_path / "weights.pt")
    message = (
        r"wide\.weight: dtype torch\.float32 in the file, torch\.float8_e4m3fn in the model, and fp8 numbers are not "
        r"converted without their scale: use the same fp8\.frozen_weights as when it was saved"
    )
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=message):
            fabric.load_raw(tmp_path / "weights.pt", module, strict=strict)
    whole = make_fabric(sharding="none", fp8={"frozen_weights": "compute"})
    torch.save(dict(module.state_dict()), tmp_path / "numbers.pt")
    message = r"wide\.weight: dtype torch\.float8_e4m3fn in the file, torch\.float32 in the model"
    with pytest.raises(StateMismatchError, match=message):
        whole.load_raw(tmp_path / "numbers.pt", whole.setup(Net()), strict=False)


@pytest.mark.parametrize(
    ("left_out", "given"),
    [
        ("fp8_weight.scale_inv", "fp8 numbers without their scale"),
        ("weight", "a scale without its fp8 numbers"),
    ],
)
def test_numbers_and_their_scale_are_loaded_together_or_not_at_all(
    left_out: str, given: str, tmp_path: Path
) -> None:
    fabric, module = kept_net()
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    _, other = kept_net(seed=1)
    loss = loss_of(other, 0)
    message = (
        rf"^wide\.weight: the state_dict has {given} \(fp8_weight\.scale_inv\), and the model keeps the two and "
        r"nothing else of it \(fp8\.frozen_weights: fp8\); load both, or neither$"
    )
    del saved[f"wide.{left_out}"]
    with pytest.raises(ValueError, match=message):
        copy.deepcopy(other).load_state_dict(saved, strict=False)
    torch.save(saved, tmp_path / "half.pt")
    message = rf"wide\.weight: the file has {given} \(wide\.fp8_weight\.scale_inv\); load both, or"
    with pytest.raises(StateMismatchError, match=message):
        fabric.load_raw(tmp_path / "half.pt", other, strict=False)
    others = {name: value for name, value in other.state_dict().items() if "wide" not in name}
    other.load_state_dict(others, strict=False)
    assert torch.equal(loss_of(other, 0), loss)


def test_numbers_are_not_loaded_into_weights_that_a_linear_in_fp8_keeps() -> None:
    _, kept = kept_net()
    weights = Net()
    plain = make_fabric(sharding="none", fp8={"recipe": "current"}).setup(weights)
    message = (
        r"^narrow\.weight: dtype torch\.float8_e4m3fn was given, but the model keeps the weight itself "
        r"\(fp8\.frozen_weights: compute, or the weight is trained\), and fp8 numbers mean nothing without their "
        r"scale; set the model up like the one that saved them, with fp8\.frozen_weights 'fp8', or give it weights$"
    )
    numbers = {name: value for name, value in kept.state_dict().items() if "narrow" in name}
    for module in (plain, copy.deepcopy(plain)):
        with pytest.raises(ValueError, match=message):
            module.load_state_dict(numbers, strict=False)
    assert not isinstance(weights.narrow.weight, Fp8Parameter)
    assert weights.narrow.weight.abs().max() < 1


def test_a_copy_of_a_model_checks_what_is_loaded_once() -> None:
    _, module = kept_net()
    hooks = copy.deepcopy(module).module.wide._load_state_dict_pre_hooks
    assert len(hooks) == len(module.module.wide._load_state_dict_pre_hooks) == 1


def test_the_numbers_are_refused_where_they_would_be_taken_for_a_weight() -> None:
    _, module = kept_net()
    message = (
        r"^linear\(\) was asked to use 'wide\.weight' outside the compiled forward, but only fp8 numbers of that "
        r"weight are kept \(fp8\.frozen_weights: fp8\), which mean nothing without their scale\. Call the module that "
        r"fabric\.setup\(\) returned, or set fp8\.frozen_weights to 'compute', which keeps the weight too\.$"
    )
    with pytest.raises(Fp8ParameterError, match=message):
        module.module(torch.randn(2, 32))
    with pytest.raises(Fp8ParameterError, match=r"matmul.* was asked to use 'wide\.weight'"):
        torch.randn(2, 272) @ module.module.wide.weight


def test_an_adapter_is_not_merged_into_the_numbers() -> None:
    model: Any = lora()
    fp8_module(model, frozen_weights="fp8", skip_modules=["lora_A", "lora_B"])
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        model.merge_and_unload()


def test_a_weight_that_is_to_be_trained_after_all_is_refused() -> None:
    _, module = kept_net()
    module.module.wide.weight.requires_grad_(True)
    message = (
        r"the weight of 'wide' requires a gradient, but it did not when the model was set up, so only its fp8 numbers "
        r"are kept \(fp8\.frozen_weights: fp8\); unfreeze it before fabric\.setup\(\), or set"
    )
    with pytest.raises(ConfigError, match=message):
        loss_of(module, 0)


def test_numbers_that_were_cast_are_refused() -> None:
    _, module = kept_net()
    loss_of(module, 0)
    module.module.to(torch.bfloat16)
    assert module.module.wide.fp8_weight.scale_inv.dtype == torch.float32
    message = (
        r"the weight of 'wide' holds fp8 numbers \(fp8\.frozen_weights: fp8\), but was cast to bfloat16 without their "
        r"scale; leave out model\.to\(dtype\) and the like after fabric\.setup\(\)\."
    )
    with pytest.raises(ConfigError, match=message):
        module(torch.randn(8, 32, dtype=torch.bfloat16))


def test_a_model_without_frozen_linears_is_refused() -> None:
    message = (
        r"fp8\.frozen_weights is 'fp8', but the model has no linear in fp8 whose weight is frozen and its own; leave "
        r"frozen_weights out, or train with `lora`\."
    )
    model = Net()
    model.requires_grad_(True)
    with pytest.raises(ConfigError, match=message):
        make_fabric(sharding="none", fp8={"frozen_weights": "fp8"}).setup(model)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"recipe": "nvfp4"}, r"fp8\.frozen_weights is 'fp8' and fp8\.recipe is 'nvfp4', whose"),
        (
            {"backend": "transformer_engine"},
            r"^fp8\.backend is transformer_engine and fp8\.recipe is delayed, but .*; or set `fp8\.backend: torch`\.$",
        ),
    ],
)
def test_a_backend_that_cannot_compute_is_refused_before_a_weight_is_cast(
    asked: dict[str, str], message: str
) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        make_fabric(sharding="none", fp8={"frozen_weights": "fp8", **asked}).setup(model)
    assert type(model.wide.weight) is nn.Parameter
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    kept = make_fabric(sharding="none", fp8={"frozen_weights": "fp8"}).setup(model)
    assert kept.module.wide.weight.dtype == FP8


def test_copies_and_pickles_hold_the_same_numbers() -> None:
    _, module = kept_net()
    loss = loss_of(module, 0)
    assert torch.equal(loss_of(copy.deepcopy(module), 0), loss)
    weight = module.module.wide.weight
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    assert isinstance(unpickled, Fp8Parameter)
    assert torch.equal(unpickled.data.view(torch.uint8), weight.data.view(torch.uint8))
    assert not unpickled.requires_grad
    with pytest.raises(Fp8ParameterError, match=r"'wide\.weight'"):
        torch.nn.functional.linear(torch.randn(2, 144), unpickled)


def test_scales_are_known_by_their_names() -> None:
    assert weight_of_scale("a.fp8_weight.scale_inv") == "a.weight"
    assert weight_of_scale("fp8_weight.scale_inv") == "weight"
    assert weight_of_scale("a.my_fp8_weight.scale_inv") is None
    assert weight_of_scale("a.weight") is None
