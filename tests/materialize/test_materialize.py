"""Modules on meta are filled from files by rows, or by their own rules, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from thunder_memsave.checkpoints import StateMismatchError, unsharded_state_dict
from thunder_memsave.checkpoints.sources import SafetensorsSource
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.materialize.fill import materialize
from thunder_memsave.materialize.pending_weights import load_on_setup, without_adapters
from thunder_memsave.sharding.rows import num_real_rows
from thunder_memsave.sharding.sharded_parameter import is_sharded

CPU = torch.device("cpu")


def llama(*, tied: bool = False, hidden: int = 12, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=hidden,
        intermediate_size=14,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def llama_on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        return llama(**options)


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    reads: list[tuple[str, int]] = []
    read = SafetensorsSource.read

    def counting(self: SafetensorsSource, name: str, rows: slice | None = None) -> Tensor:
        t = read(self, name, rows)
        reads.append((name, t.numel()))
        return t

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", counting)
        yield reads


def check_materialize(rank: int, root: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=100))
    dp = DataParallel(mode="zero2", group=group)
    torch.manual_seed(rank)
    _check_weights(rank, root, dp)
    _check_tied(root, dp)
    _check_adapters(root, dp)
    _check_rules(dp)
    _check_shapes_are_checked_first(root, dp)


def _check_same(module: nn.Module, reference: nn.Module, dp: DataParallel | None) -> None:
    state = unsharded_state_dict(module, dp)
    assert state.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value), name
    for name, buffer in reference.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name


def _check_weights(rank: int, root: Path, dp: DataParallel) -> None:
    model, reference = llama_on_meta(), llama()
    before = dict(model.named_parameters())
    with counted_reads(pytest.MonkeyPatch()) as reads:
        materialize(model, device=CPU, data_parallel=dp, weights=root / "untied")
    _check_same(model, reference, dp)
    for name, p in model.named_parameters():
        assert p is before[name]
        assert is_sharded(p)
        assert p.requires_grad
        assert not p.data[num_real_rows(p) :].any()
        assert (name, num_real_rows(p) * p.data[0].numel()) in reads, "read more than its own rows"
    assert len(reads) == len(before)
    assert model.lm_head.weight.data.shape == (9, 12)
    assert num_real_rows(model.lm_head.weight) == 9 - rank


def _check_tied(root: Path, dp: DataParallel) -> None:
    model = llama_on_meta(tied=True, dtype=torch.bfloat16)
    materialize(model, device=CPU, data_parallel=dp, weights=root / "tied" / "model.safetensors")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype is torch.bfloat16
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        root / "tied", dtype=torch.bfloat16
    )
    _check_same(model, reference, dp)


def _check_adapters(root: Path, dp: DataParallel) -> None:
    """Wrapped between `load_on_setup` and setup, as in a script."""
    base = llama_on_meta()
    load_on_setup(base, root / "untied")
    model = with_lora(base)
    materialize(model, device=CPU, data_parallel=dp)
    state = unsharded_state_dict(model, dp)
    assert not any(p.is_meta for p in model.parameters())
    stored = {without_adapters(name): value for name, value in state.items()}
    for name, value in llama().state_dict().items():
        assert torch.equal(stored[name], value), name
    lora = {name: value for name, value in state.items() if "lora_" in name}
    assert len(lora) == 8
    assert all(value.any() == ("lora_A" in name) for name, value in lora.items())
    _check_equal_on_all_ranks(lora, dp)


def _check_rules(dp: DataParallel) -> None:
    """Without files: rank 0's seed counts, and the generator of the rank is left alone."""
    makers: list[Callable[[], Any]] = [llama_on_meta, lambda: with_lora(llama_on_meta())]
    for make in makers:
        model = make()
        generator = torch.get_rng_state()
        materialize(model, device=CPU, data_parallel=dp)
        assert torch.equal(torch.get_rng_state(), generator)
        state = unsharded_state_dict(model, dp)
        _check_equal_on_all_ranks(state, dp)
        torch.manual_seed(dp.rank)
        if dp.rank == 0:
            alone = make()
            materialize(alone, device=CPU, data_parallel=None)
            assert all(torch.equal(alone.state_dict()[n], v) for n, v in state.items())


def _check_equal_on_all_ranks(state: dict[str, Tensor], dp: DataParallel) -> None:
    others: list[Any] = [None] * dp.world_size
    dist.all_gather_object(others, {n: v.tolist() for n, v in state.items()}, group=dp.group)
    assert others[0] == others[1]


def _check_shapes_are_checked_first(root: Path, dp: DataParallel) -> None:
    model = llama_on_meta(hidden=16)
    with pytest.raises(StateMismatchError, match=r"q_proj.weight: shape \(12, 12\) in the files, "):
        materialize(model, device=CPU, data_parallel=dp, weights=root / "untied")
    assert all(p.is_meta for p in model.parameters())


def test_two_ranks_materialize_their_rows_of_one_model(tmp_path: Path) -> None:
    root = tmp_path / "models"
    llama().save_pretrained(root / "untied", max_shard_size="3KB")
    assert (root / "untied" / "model.safetensors.index.json").is_file()
    llama(tied=True).save_pretrained(root / "tied")
    run_on_ranks(check_materialize, 2, tmp_path / "rendezvous", root)


class Rotary(nn.Module):
    """A constant table that only the constructor computes."""

    def __init__(self, dim: int, base: float = 10.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        self.register_buffer("table", base ** torch.arange(dim), persistent=False)


class Forgetful(nn.Module):
    """The same, without an attribute that tells its argument."""

    def __init__(self, dim: int, base: float = 10.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("table", base ** torch.arange(dim), persistent=False)


class Halving(nn.Module):
    """Keeps another value than its argument under the argument's name."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim // 2
        self.register_buffer("table", torch.full((4,), float(dim)), persistent=False)


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = make()
        return module


def test_constant_buffers_are_computed_by_their_constructor() -> None:
    net = on_meta(lambda: nn.Sequential(Rotary(3, base=7.0), nn.Linear(3, 2)))
    materialize(net, device=CPU, data_parallel=None)
    assert net.get_buffer("0.table").tolist() == [1.0, 7.0, 49.0]


@pytest.mark.parametrize("make", [lambda: Forgetful(3, base=7.0), lambda: Halving(8)])
def test_constant_buffers_that_cannot_be_recomputed_are_named(make: Any) -> None:
    net = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), make()))
    with pytest.raises(ValueError, match=r"buffer '1.table' is on the meta device, and (F|H)"):
        materialize(net, device=CPU, data_parallel=None)


def test_integer_and_running_statistics_follow_the_modules_rule() -> None:
    net = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    materialize(net, device=CPU, data_parallel=None)
    fresh = nn.BatchNorm1d(2)
    for name, value in fresh.state_dict().items():
        assert torch.equal(net.state_dict()[f"1.{name}"], value), name


def test_a_parameter_without_a_rule_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"parameter 'weight' is on the meta device, and Bare doe"):
        materialize(on_meta(Bare), device=CPU, data_parallel=None)


def test_a_rule_that_reaches_into_submodules_does_not_undo_what_was_loaded(tmp_path: Path) -> None:
    class Outer(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("shift", torch.zeros(2), persistent=False)

        def reset_parameters(self) -> None:
            nn.init.constant_(self.inner.weight, 5.0)
            self.shift.fill_(4.0)

    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "inner.pt")
    net: Any = on_meta(Outer)
    load_on_setup(net.inner, tmp_path / "inner.pt")
    materialize(net, device=CPU, data_parallel=None)
    assert torch.equal(net.inner.weight, torch.load(tmp_path / "inner.pt")["weight"])
    assert net.shift.tolist() == [4.0, 4.0]


def test_a_residual_rule_of_the_whole_model_is_followed() -> None:
    """GPT-2 scales the projections into the residual stream by the number of layers."""
    config = transformers.GPT2Config(n_layer=8, n_embd=64, n_head=2, vocab_size=16, n_positions=8)
    model = on_meta(lambda: transformers.GPT2LMHeadModel(config))
    materialize(model, device=CPU, data_parallel=None)
    scaled = model.get_parameter("transformer.h.0.mlp.c_proj.weight").std()
    plain = model.get_parameter("transformer.h.0.mlp.c_fc.weight").std()
    # 16384 samples: the sample's deviation is within 2 % of 1 / sqrt(2 * 8).
    assert 0.23 < scaled / plain < 0.27


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3), "old": torch.ones(1)}, tmp_path / "w.pt")
    net = on_meta(lambda: nn.Linear(3, 2))
    with pytest.raises(StateMismatchError) as caught:
        materialize(net, device=CPU, data_parallel=None, weights=tmp_path / "w.pt")
    assert "bias: missing: the model has it, the files do not" in str(caught.value)
    assert "old: unexpected: the files have it, the model does not" in str(caught.value)


def test_names_can_be_mapped(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "w.pt")
    net = on_meta(lambda: nn.Linear(3, 2))
    rename = {"weight": "w"}.get
    materialize(net, device=CPU, data_parallel=None, weights=tmp_path / "w.pt", rename=rename)
    assert torch.equal(net.get_parameter("weight"), torch.ones(2, 3))
    assert net.get_parameter("bias").isfinite().all()


def test_a_module_with_values_is_not_noted_for_later(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Linear was to be filled from .*has values already.*raw"):
        load_on_setup(nn.Linear(2, 2), tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("base_model.model.q_proj.base_layer.weight", "q_proj.weight"),
        ("q_proj.base_layer.bias", "q_proj.bias"),
        ("score.modules_to_save.default.weight", "score.weight"),
        ("score.original_module.weight", "score.weight"),
        ("q_proj.lora_A.default.weight", None),
        ("embed.lora_embedding_B.default", None),
        ("my_lora_like.weight", "my_lora_like.weight"),
    ],
)
def test_names_before_peft_wrapped_the_model(name: str, stored: str | None) -> None:
    assert without_adapters(name) == stored


def test_initial_values_do_not_reseed_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` seeds every device, and one seed on all ranks is one dropout mask."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with torch.device("meta"):
        net = nn.Linear(3, 3)
    materialize(net, device=CPU, data_parallel=None)
    assert not seeds


class Scaled(nn.Module):
    """Its own rule sets what the model's rule leaves out, and makes a buffer anew."""

    wave: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("wave", torch.ones(4).cos(), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        self.wave = torch.arange(4.0).cos()


class KnowsLinears(nn.Module):
    """Its rule is for layers that have set themselves up, as litgpt's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)


def test_what_a_models_rule_leaves_out_follows_the_layers_own() -> None:
    with torch.device("meta"):
        model = KnowsLinears()
    materialize(model, device=CPU, data_parallel=None)
    assert model.layer.linear.weight.eq(0.5).all()
    assert model.layer.linear.bias.abs().lt(1).all()
    assert model.layer.scale.eq(2.0).all()
    assert torch.equal(model.layer.wave, torch.arange(4.0).cos())
