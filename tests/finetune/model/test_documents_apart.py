"""Documents of a packed row never see each other, by their boundaries as by a mask, in every kind of model."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from thunder.core.proxies import TensorProxy
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from harness.custom_experts import skip_if_untraceable
from harness.language_model import TINY_DECODER, loss_sum, sample_of
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.finetune.data.packing import Rows, pack, pad
from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.finetune.model import windows
from thunder_memsave.finetune.model.documents_apart import (
    MaskKind,
    mask_kind,
    take_boundaries,
)
from thunder_memsave.finetune.model.packable import check_packable
from thunder_memsave.finetune.run_file.config import DataConfig, ModelConfig, RunConfig

LENGTH = 26  # like no other dimension
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {},
    "llama": {},
    "mistral": {"sliding_window": LENGTH},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": _LAYERS,
    "exaone4": _LAYERS,
    "gemma3_text": {"head_dim": 8, **_LAYERS},
    "ministral": {"head_dim": 8, **_LAYERS},
    "ministral3": {"head_dim": 8},
    "mistral": {},
    "mixtral": _EXPERTS,
    "olmo3": _LAYERS,
    "phi3": {},
    "phimoe": _EXPERTS,
    "qwen2": {"use_sliding_window": True, **_LAYERS},
    "qwen2_moe": {
        "use_sliding_window": True,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        **_EXPERTS,
        **_LAYERS,
    },
    "qwen3": {"head_dim": 8, "use_sliding_window": True, **_LAYERS},
    "qwen3_moe": {
        "head_dim": 8,
        "use_sliding_window": True,
        "moe_intermediate_size": 16,
        **_EXPERTS,
    },
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 1], **_LAYERS},
    "starcoder2": {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
WINDOW = 4
LENGTHS = (5, 9, 3, 12, 2, 8)


def model_of(model_type: str, **values: Any) -> Any:
    values = values or MODELS[model_type]
    architecture = AutoConfig.for_model(model_type, **{**TINY_DECODER, **values})
    set_seed(0)
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="sdpa").double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention matters
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def rows_of(*, packed: bool) -> Rows:
    generator = torch.Generator().manual_seed(0)
    samples = [sample_of(torch.randint(4, 60, (n,), generator=generator).tolist()) for n in LENGTHS]
    if packed:
        return pack(samples, length=LENGTH, pad_id=0, seed=0)
    return pad(samples, length=LENGTH, pad_id=0)


def names_and_squares(compiled: CompiledModule) -> tuple[list[str], set[str]]:
    """The attention operators of a step, and the tensors of two sequence dimensions."""
    captured = compiled.captures[-1]
    symbols = [
        b
        for t in (captured.forward_traces[-1], captured.backward_traces[-1])
        for b in t.bound_symbols
    ]
    proxies = [p for b in symbols for p in b.flat_proxy_outs if isinstance(p, TensorProxy)]
    return (
        [b.sym.name for b in symbols if "attention" in b.sym.name],
        {p.name for p in proxies if p.shape[-2:] == (LENGTH, LENGTH)},
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_rows_have_the_loss_and_gradients_of_their_documents_alone(model_type: str) -> None:
    operators, squares = compare_with_documents_alone(model_of(model_type))
    assert operators == ["cpu_packed_attention"] * 2 + ["cpu_packed_attention_backward"] * 2
    assert not squares


@pytest.mark.parametrize("model_type", WINDOWED)
def test_packed_rows_keep_the_windows_of_their_layers(model_type: str) -> None:
    model = model_of(model_type, sliding_window=WINDOW, **WINDOWED[model_type])
    assert WINDOW in (windows.windows_of(model) or {}).values()
    if _EXPERTS.items() <= WINDOWED[model_type].items():
        skip_if_untraceable()
    if "num_experts" in WINDOWED[model_type]:
        model.float()  # torch's grouped products take no float64
    check_packable(model, RunConfig(data=DataConfig(max_seq_length=LENGTH)))
    operators, squares = compare_with_documents_alone(model)
    assert operators == ["cpu_packed_attention"] * 2 + ["cpu_packed_attention_backward"] * 2
    assert not squares


def test_all_models_whose_masks_can_have_a_window_are_tried() -> None:
    assert set(WINDOWED) == windows._OF_ALL_LAYERS | windows._BY_KIND


def compare_with_documents_alone(model: Any) -> tuple[list[str], set[str]]:
    """Compare packed rows with documents in rows of their own; return `names_and_squares` of the packed ones."""
    alone, packed = copy.deepcopy(model), rows_of(packed=True)
    take_boundaries(model)
    compiled = CompiledModule(model)
    loss = sum(
        loss_sum(compiled, packed.lay_out([k]), mask="boundaries") for k in range(len(packed))
    )
    cast(Tensor, loss).backward()
    apart = rows_of(packed=False)
    expected = sum(loss_sum(alone, apart.lay_out([k]), mask="none") for k in range(len(apart)))
    cast(Tensor, expected).backward()
    # transformers computes norms and the loss in float32, whatever the model's numbers are.
    rtol = 1e-6 if model.dtype is torch.float64 else 1e-5
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=1e-6)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert len(compiled.captures) == 1  # rows have 2 to 3 documents
    return names_and_squares(compiled)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_no_gradient_reaches_another_document(is_compiled: bool) -> None:
    model = model_of("llama")
    take_boundaries(model)
    batch = rows_of(packed=True).lay_out([0])
    end = int(batch.document_ends[0, 0])
    batch.input_ids[0] = torch.arange(
        1, LENGTH + 1
    )  # so that each position has a weight of its own
    batch.targets[0, end:] = IGNORED
    compiled = CompiledModule(model) if is_compiled else model
    loss_sum(compiled, batch, mask="boundaries").backward()
    gradients = model.model.embed_tokens.weight.grad[1 : LENGTH + 1]
    assert bool((gradients[: end - 1].abs().sum(-1) > 0).all())
    assert torch.equal(gradients[end:], torch.zeros_like(gradients[end:]))


def test_a_mask_or_none_is_taken_as_before() -> None:
    model = model_of("llama").eval()
    ids = torch.randint(4, 60, (2, LENGTH))
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, -3:] = 0
    expected = [model(input_ids=ids, attention_mask=m).logits for m in (None, padding)]
    take_boundaries(model)
    for mask, logits in zip((None, padding), expected, strict=True):
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, logits)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (RunConfig(), "boundaries"),
        (RunConfig(data=DataConfig(packing=False)), "none"),
        (RunConfig(model=ModelConfig(attn_implementation="eager")), "additive"),
    ],
)
def test_the_run_file_decides_how_documents_are_kept_apart(
    config: RunConfig, kind: MaskKind
) -> None:
    assert mask_kind(config) == kind
