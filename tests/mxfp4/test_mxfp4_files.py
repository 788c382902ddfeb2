"""Files in MXFP4 as gpt-oss has it: read with transformers' numbers, kept as the bytes that they are, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness.mxfp4_tensors import bits, gpt_oss, parts, write_model
from thunder_memsave.checkpoints.quantized_files.mxfp4_source import Mxfp4Source
from thunder_memsave.checkpoints.quantized_files.stored_source import with_dequantized
from thunder_memsave.checkpoints.sources import StateDictSource, TensorSource, open_source
from thunder_memsave.stored_weights.format import QuantizedFilesError

SHAPE = (5, 64, 7)


def tensors(**changed: Tensor | None) -> dict[str, Tensor]:
    codes, scales = parts(SHAPE, 0)
    found: dict[str, Tensor | None] = {
        "w_blocks": codes,
        "w_scales": scales,
        "w_bias": torch.ones(5, 7),
    }
    return {name: value for name, value in (found | changed).items() if value is not None}


class Counting(StateDictSource):
    """Notes the rows that are read."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        super().__init__(found)
        self.read_rows: list[int] = []

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        found = super().read(name, rows)
        self.read_rows.append(len(found))
        return found


def source_of(source: TensorSource) -> Mxfp4Source:
    found = with_dequantized(source)
    assert isinstance(found, Mxfp4Source)
    return found


def test_a_source_has_the_weight_of_transformers_under_its_name_alone() -> None:
    source = source_of(StateDictSource(tensors()))
    expected = convert_moe_packed_tensors(*parts(SHAPE, 0))
    assert sorted(source.names()) == ["w", "w_bias"]
    assert source.spec("w").shape == expected.shape == SHAPE
    assert source.spec("w").dtype == source.read("w").dtype == expected.dtype
    assert torch.equal(source.read("w_bias", slice(1, 3)), torch.ones(2, 7))
    for rows in (None, slice(0, 1), slice(2, 2), slice(1, 4), slice(3, None), slice(-2, None)):
        found, some = source.read("w", rows), expected if rows is None else expected[rows]
        assert found.shape == some.shape
        assert torch.equal(bits(found), bits(some)), rows


def test_only_the_experts_asked_for_are_read() -> None:
    inner = Counting(tensors())
    source = source_of(inner)
    source.read("w", slice(1, 3))
    source.stored("w", slice(4, 5))
    assert inner.read_rows == [2, 2, 1, 1]


def test_a_directory_has_the_values_that_transformers_loads(tmp_path: Path) -> None:
    """On a CPU, transformers dequantises them itself."""
    torch.manual_seed(0)
    directory = write_model(tmp_path / "model", gpt_oss())
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    source = source_of(open_source(directory))
    expected = loaded.state_dict()
    assert set(source.names()) == set(expected)
    for name, value in expected.items():
        assert torch.equal(bits(source.read(name).bfloat16()), bits(value)), name


def test_floating_tensors_of_such_names_are_read_as_they_are() -> None:
    source = StateDictSource({"w_blocks": torch.ones(2, 3), "other_scales": torch.ones(2)})
    assert with_dequantized(source) is source


WRONG_SCALE = parts(SHAPE, 0)[1].index_fill(0, torch.tensor([3]), 255)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"w_scales": None}, r"w of the weight files has w_blocks, but no w_scales, so it is"),
        ({"w_blocks": None}, r"has w_scales, but no w_blocks"),
        ({"w_scales": torch.ones(5, 7, 2)}, r"has w_scales in float32, not uint8"),
        ({"w_blocks": torch.ones(5, 7, 2, 16)}, r"has w_blocks in float32, not uint8"),
        (
            {"w_blocks": torch.zeros(5, 7, 4, 8, dtype=torch.uint8)},
            r"w_blocks of shape \(5, 7, 4, 8\), not \(experts, outputs, blocks, 16\)",
        ),
        ({"w_blocks": torch.zeros(7, 2, 16, dtype=torch.uint8)}, r"w_blocks of shape \(7, 2, 16\)"),
        (
            {"w_scales": torch.zeros(5, 7, 3, dtype=torch.uint8)},
            r"w_scales of shape \(5, 7, 3\), not \(5, 7, 2\), one for each block",
        ),
        ({"w_scales": WRONG_SCALE}, r"has scales of 255, which is no number"),
    ],
    ids=["no scales", "no blocks", "float scales", "float blocks", "sizes", "dims", "shape", "NaN"],
)
def test_odd_or_damaged_files_are_refused_with_a_way_out(
    changed: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(QuantizedFilesError, match=message) as error:
        source_of(StateDictSource(tensors(**changed))).read("w")
    assert "download the files again, or name a model whose weights are in" in str(error.value)
    assert error.value.key == "model.name_or_path"


def test_experts_before_a_damaged_one_are_read() -> None:
    source = source_of(StateDictSource(tensors(w_scales=WRONG_SCALE)))
    assert len(source.read("w", slice(0, 3))) == 3


def test_files_that_were_written_have_the_published_layout(tmp_path: Path) -> None:
    written = load_file(write_model(tmp_path, gpt_oss()) / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert written[f"{name}_blocks"].shape == (3, 2 * 96, 64 // 32, 16)
    assert written[f"{name}_scales"].shape == (3, 2 * 96, 64 // 32)
    assert name not in written
