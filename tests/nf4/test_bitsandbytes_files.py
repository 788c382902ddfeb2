"""Weights that bitsandbytes wrote in NF4 keep their bytes: nothing is quantised again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.nf4_tensors import as_json, digest, in_files
from thunder_memsave import load_on_setup
from thunder_memsave.checkpoints.quantized_files.nf4_source import Nf4Source
from thunder_memsave.checkpoints.quantized_files.stored_source import with_dequantized
from thunder_memsave.checkpoints.sources import StateDictSource, open_source
from thunder_memsave.stored_weights.format import QuantizedFilesError
from thunder_memsave.stored_weights.nf4.layout import GROUP, groups_of, num_bytes, spans
from thunder_memsave.stored_weights.nf4.numbers import dequantize, quantize

SHAPES = {"up.weight": (401, 161), "down.weight": (161, 401), "lm_head.weight": (16, 161)}


class Net(nn.Module):
    """Frozen linears whose groups are no whole rows, after a trained factor; the files have the head in NF4 too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(161, 401)
        self.down = nn.Linear(401, 161, bias=False)
        self.lm_head = nn.Linear(161, 16, bias=False)
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(161))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + self.down(torch.tanh(self.up(x * self.factor)))).square().mean()


def stored_of(name: str) -> Tensor:
    """Return bytes that no weight has after our quantising: blocks need not reach their scales."""
    generator = torch.Generator().manual_seed(len(name))
    shape = SHAPES[name]
    stored = quantize(0.1 * torch.randn(shape, generator=generator), name=name)
    for first, last in spans(math.prod(shape), num_groups=1):
        numbers = groups_of(stored, math.prod(shape), first=first, last=last).numbers
        numbers.copy_(torch.randint(2, 13, numbers.shape, generator=generator))
    return stored


def files() -> dict[str, Tensor]:
    found = {"up.bias": torch.linspace(-1, 1, 401), "factor": torch.linspace(1, 2, 161)}
    for name, shape in SHAPES.items():
        found |= in_files(name, stored_of(name), shape)
    return found


def dequantised() -> Net:
    model = Net()
    with torch.no_grad():
        for name, value in files().items():
            if name in SHAPES:
                model.get_parameter(name).copy_(
                    dequantize(stored_of(name), SHAPES[name], torch.float32)
                )
            elif name in ("up.bias", "factor"):
                model.get_parameter(name).copy_(value)
    return model


def loaded(fabric: Any, path: Path) -> Any:
    with fabric.init_module(empty_init=True):
        model = Net()
    load_on_setup(model, path)
    return fabric.setup(model)


def check_the_bytes_and_a_step(num_ranks: int, sharding: str, path: Path) -> None:
    fabric = make_fabric(devices=num_ranks, sharding=sharding, frozen_weights="nf4")
    plain = make_fabric(devices=num_ranks, sharding=sharding)
    module, expected = loaded(fabric, path), plain.setup(dequantised())
    whole = fabric.strategy.get_module_state_dict(module)
    assert torch.equal(whole["up.weight"], stored_of("up.weight"))
    assert torch.equal(whole["down.weight"], stored_of("down.weight"))
    assert whole["lm_head.weight"].dtype == torch.float32  # as from other files, it is not kept so
    x = torch.linspace(-1, 1, 8 * 161).view(8, 161) + fabric.global_rank
    results = []
    for each in (module, expected):
        loss = each(x)
        fabric.backward(loss)
        results.append((loss, each.module.factor.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_bytes_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(files(), path)
    again = quantize(dequantize(stored_of("up.weight"), (401, 161), torch.float32), name="w")
    assert not torch.equal(again, stored_of("up.weight"))
    check_the_bytes_and_a_step(1, "none", path)


@on_fabric_rank
def check_two_ranks(directory: Path) -> None:
    check_the_bytes_and_a_step(2, "zero3", directory / "model.safetensors")


def test_two_ranks_share_the_bytes(tmp_path: Path) -> None:
    save_file(files(), tmp_path / "model.safetensors")
    run_on_fabric_ranks(check_two_ranks, 2, tmp_path)


def source_of(tensors: dict[str, Tensor]) -> Nf4Source:
    found = with_dequantized(StateDictSource(tensors))
    assert isinstance(found, Nf4Source)
    return found


def test_a_source_has_the_dequantised_weight_under_its_name_alone() -> None:
    source = source_of(files())
    assert sorted(source.names()) == sorted([*SHAPES, "up.bias", "factor"])
    for name, shape in SHAPES.items():
        assert source.spec(name).shape == shape
        whole = dequantize(stored_of(name), shape, torch.float32)
        assert torch.equal(source.read(name), whole)
        for rows in (slice(0, 1), slice(7, 7), slice(100, 103), slice(5, None), slice(-3, None)):
            assert torch.equal(source.read(name, rows), whole[rows]), (name, rows)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 64), (3, 3), (2, GROUP), (GROUP + 8, 1)])
def test_codes_may_be_stored_in_another_dtype(shape: tuple[int, int], storage: Any) -> None:
    """By `bnb_4bit_quant_storage`, whose elements have several bytes."""
    if math.prod(shape) % (2 * storage.itemsize):
        pytest.skip("bitsandbytes itself cannot view such a number of bytes so")
    stored = quantize(torch.randn(shape), name="w")
    tensors = in_files("w", stored, shape)
    tensors["w"] = tensors["w"].flatten().view(storage)[:, None]
    source = source_of(tensors)
    assert torch.equal(source.stored("w"), stored)
    assert len(source.stored("w")) == num_bytes(math.prod(shape))
    assert torch.equal(source.read("w"), dequantize(stored, shape, torch.float32))


def test_a_weight_that_transformers_wrote_has_the_numbers_of_bitsandbytes() -> None:
    """The file is of `save_pretrained` of transformers 5.23 with bitsandbytes 0.50.2, on the CPU."""
    source = with_dequantized(open_source(Path(__file__).parent / "of_transformers.safetensors"))
    assert set(source.names()) == {"q_proj.weight"}
    by_bitsandbytes = "0d1c3c8ba2d2e12646326c93f4a0f425"
    assert digest(source.read("q_proj.weight")) == by_bitsandbytes


def test_files_without_quantised_weights_are_read_as_they_are() -> None:
    source = StateDictSource({"w.weight": torch.ones(2, 2), "absmax": torch.ones(1)})
    assert with_dequantized(source) is source


def changed(**state: Any) -> dict[str, Tensor]:
    tensors = in_files("w", quantize(torch.randn(8, 64), name="w"), (8, 64))
    key = "w.quant_state.bitsandbytes__nf4"
    before = json.loads(tensors[key].numpy().tobytes())
    kept = {k: v for k, v in {**before, **state}.items() if v is not None}
    return {**tensors, key: as_json(kept)}


def of_kind(kind: str) -> dict[str, Tensor]:
    tensors = changed()
    state = tensors.pop("w.quant_state.bitsandbytes__nf4")
    return {**tensors, f"w.quant_state.bitsandbytes__{kind}": state}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (of_kind("fp4"), r"w of the weight files is in fp4, which is not read; quantise"),
        (changed(blocksize=128), r"w of .* has blocks of 128 elements, .* so that they have 64"),
        (changed(nested_blocksize=64), r"has blocks of 64 scales, .* so that they have 256"),
        (changed(nested_blocksize=None), r"scales that are not quantised themselves.*double_quant"),
        ({**changed(), "w.quant_map": torch.zeros(16)}, r"has other tables of numbers"),
        ({"w.weight": torch.ones(2, 2), "w.SCB": torch.ones(2)}, r"w\.weight .* 8 bits, which is"),
    ],
    ids=["fp4", "blocks", "blocks of scales", "one quantisation", "tables", "int8"],
)
def test_other_settings_are_refused_with_a_way_out(
    tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(QuantizedFilesError, match=message) as error:
        source_of(tensors).spec("w")
    assert "or name the model that it was made from" in str(error.value)


@pytest.mark.parametrize("kept", [None, "int8"])
def test_a_model_that_is_not_to_keep_them_refuses_them(kept: str | None, tmp_path: Path) -> None:
    save_file(files(), tmp_path / "model.safetensors")
    fabric = make_fabric(sharding="none", frozen_weights=kept)
    with pytest.raises(QuantizedFilesError, match=r"have 3 weights in NF4, such as .*'nf4', or"):
        loaded(fabric, tmp_path / "model.safetensors")


def test_files_of_bitsandbytes_itself_are_read_bit_by_bit(tmp_path: Path) -> None:
    reason = "bitsandbytes is not installed; files made by hand are read"
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=reason)
    weight = torch.randn(96, 176, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    linear = bitsandbytes.nn.Linear4bit(
        176, 96, bias=False, quant_type="nf4", compress_statistics=True
    )
    linear.weight = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    written = linear.to("cpu").state_dict()
    save_file({name: value.contiguous() for name, value in written.items()}, tmp_path / "w")
    ours = in_files("weight", quantize(weight, name="weight"), (96, 176))
    assert written.keys() == ours.keys()
    source = with_dequantized(open_source((tmp_path / "w").rename(tmp_path / "w.safetensors")))
    assert isinstance(source, Nf4Source)
    assert torch.equal(source.stored("weight"), quantize(weight, name="weight"))
