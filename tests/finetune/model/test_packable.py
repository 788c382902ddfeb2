from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from harness.language_model import TINY_DECODER, loss_sum, sample_of
from thunder_memsave.finetune.data.packing import pack, pad
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.model.packable import check_packable
from thunder_memsave.finetune.run_file.config import DataConfig, ModelConfig, RunConfig
from thunder_memsave.settings.problems import ConfigError


def model_of(model_type: str, attention: str = "eager", **values: Any) -> Any:
    architecture = AutoConfig.for_model(model_type, **{**TINY_DECODER, **values})
    set_seed(0)
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention matters
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def run(length: int = 24, *, packing: bool = True) -> RunConfig:
    return RunConfig(data=DataConfig(max_seq_length=length, packing=packing))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("gemma", {"head_dim": 8}),
        ("gemma3_text", {"head_dim": 8}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("llama", {}),
        ("mistral", {}),
        ("phi", {}),
        ("phi3", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 8}),
        ("qwen3_moe", {"head_dim": 8}),
    ],
)
@torch.no_grad()
def test_packed_rows_have_the_loss_of_unpacked_ones(
    model_type: str, values: dict[str, Any], attention: str
) -> None:
    model = model_of(model_type, attention, **values)
    check_packable(model, run())
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 9, 3, 12, 2, 8)
    samples = [sample_of(torch.randint(4, 60, (n,), generator=generator).tolist()) for n in lengths]
    packed = pack(samples, length=24, pad_id=0, seed=0)
    alone = pad(samples, length=24, pad_id=0)

    def loss(rows: Any, mask: MaskKind) -> float:
        return float(sum(loss_sum(model, rows.lay_out([k]), mask=mask) for k in range(len(rows))))

    expected = loss(alone, "none")
    assert loss(packed, "additive") == pytest.approx(expected, rel=1e-5)
    # Without a mask the documents do influence each other.
    assert loss(packed, "none") != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("gpt_oss", {"sliding_window": 16}, "sliding window of 16 tokens is shorter than data.max"),
        ("bloom", {}, "takes no position_ids, which start anew"),
        ("falcon", {"alibi": True}, "computes distances from the row"),
        ("jamba", {}, "its layers pass a state from token to token"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "its layers pass a state"),
    ],
)
def test_packing_is_refused_where_documents_would_mix(
    model_type: str, values: dict[str, Any], message: str
) -> None:
    with torch.device("meta"):
        architecture = AutoConfig.for_model(model_type, **{**TINY_DECODER, **values})
        model: Any = AutoModelForCausalLM.from_config(architecture)
    with pytest.raises(
        ConfigError, match=rf"does not go with this model \({model_type}\).*{message}"
    ):
        check_packable(model, run())
    check_packable(model, run(packing=False))


def test_a_window_needs_the_mask_that_can_have_it() -> None:
    config = RunConfig(model=ModelConfig(attn_implementation="eager"))
    message = "the mask of packed rows cannot have it with attn_implementation: eager"
    with torch.device("meta"):
        architecture = AutoConfig.for_model("mistral", **{**TINY_DECODER, "sliding_window": 16})
        model: Any = AutoModelForCausalLM.from_config(architecture)
    check_packable(model, run())
    with pytest.raises(ConfigError, match=message):
        check_packable(model, replace(config, data=DataConfig(max_seq_length=24)))
    check_packable(model, replace(config, data=DataConfig(max_seq_length=16)))
