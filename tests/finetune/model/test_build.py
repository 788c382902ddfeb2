from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness.language_model import VOCAB_SIZE, llama_config
from harness.mxfp4_tensors import UNQUANTIZED, gpt_oss, write_model
from thunder_memsave.finetune.model import weight_names
from thunder_memsave.finetune.model.build import (
    build_model,
    describe_model,
    load_tokenizer,
    precision_of,
    with_attention,
)
from thunder_memsave.finetune.model.documents_apart import mask_kind
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig, TrainConfig
from thunder_memsave.materialize.fill import materialize
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes


def run_config(directory: Path, *, lora: dict[str, Any] | None, **model: Any) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(name_or_path=str(directory), **model),
        lora=lora,
        train=TrainConfig(seed=3),
    )
    return dataclasses.replace(config, data=dataclasses.replace(config.data, max_seq_length=32))


@pytest.mark.parametrize(
    ("dtype", "trainable", "lora", "precision"),
    [
        ("float32", "float32", True, "32-true"),
        ("bfloat16", "float32", True, "bf16-mixed"),
        ("bfloat16", "bfloat16", True, "32-true"),
        ("bfloat16", "float32", False, "bf16-mixed"),
        ("bfloat16", "bfloat16", False, "32-true"),
    ],
)
def test_frozen_and_trained_weights_have_the_formats_asked_for(
    model_directory: Path, tokenizer: Any, dtype: str, trainable: str, lora: bool, precision: str
) -> None:
    fields = {"r": 2, "target_modules": ["q_proj"]} if lora else None
    config = run_config(model_directory, lora=fields, dtype=dtype, trainable_dtype=trainable)
    model = build_model(config, tokenizer)
    formats = {
        is_trained: {str(p.dtype) for p in model.parameters() if p.requires_grad is is_trained}
        for is_trained in (True, False)
    }
    assert formats == {
        True: {f"torch.{trainable}"},
        False: {f"torch.{dtype}"} if lora else set(),
    }
    assert precision_of(config) == precision


def test_nothing_is_read_before_setup_and_then_the_files_values_are_there(
    model_directory: Path, tokenizer: Any
) -> None:
    fields = {"r": 2, "target_modules": "all-linear"}
    model: Any = build_model(run_config(model_directory, lora=fields, dtype="float32"), tokenizer)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, device=torch.device("cpu"), data_parallel=None)
    stored = AutoModelForCausalLM.from_pretrained(model_directory)
    ids = torch.tensor([[5, 6, 7]])
    # A new adapter changes nothing: peft starts its second factor at zero.
    torch.testing.assert_close(model(input_ids=ids).logits, stored(input_ids=ids).logits)


def test_random_weights_depend_on_the_seed_only(tokenizer_directory: Path, tokenizer: Any) -> None:
    architecture = {"model_type": "llama", **llama_config()}
    config = run_config(tokenizer_directory, lora=None, config=architecture)

    def weights(seed: int) -> torch.Tensor:
        model: Any = build_model(config, tokenizer)
        torch.manual_seed(seed)
        materialize(model, device=torch.device("cpu"), data_parallel=None)
        return model.lm_head.weight.detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert weights(1).std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("lora", [{"r": 2, "target_modules": "all-linear"}, None])
def test_weights_are_found_under_the_names_that_files_have_for_them(
    tmp_path: Path, tokenizer: Any, lora: dict[str, Any] | None
) -> None:
    # For this model type, files name the output layer differently from transformers.
    config = run_config(saved(tmp_path, "gpt_neox"), lora=lora, dtype="float32")
    model: Any = build_model(config, tokenizer)
    materialize(model, device=torch.device("cpu"), data_parallel=None)
    ids = torch.tensor([[5, 6, 7]])
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_weights_that_would_have_to_be_put_together_in_another_way_are_refused(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few model types of transformers have such weights: stacks are known."""
    monkeypatch.setattr(weight_names, "_stacks_experts", lambda _: False)
    directory = saved(tmp_path, "qwen3_moe", head_dim=8, num_experts=4, num_key_value_heads=2)
    with pytest.raises(
        ConfigError, match=r"hold 'model\.layers.*experts.*transformers makes a part"
    ):
        build_model(run_config(directory, lora=None), tokenizer)


def saved(directory: Path, model_type: str, **values: Any) -> Path:
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": VOCAB_SIZE}
    architecture = AutoConfig.for_model(model_type, **{**tiny, **heads, **values})
    AutoModelForCausalLM.from_config(architecture).save_pretrained(directory)
    return directory


def test_a_directory_that_lacks_a_part_of_a_model_is_refused(
    tmp_path: Path, model_directory: Path, tokenizer: Any
) -> None:
    shutil.copy(model_directory / "model.safetensors", tmp_path)
    config = run_config(tmp_path, lora=None)
    with pytest.raises(ConfigError, match="cannot load a tokenizer from") as error:
        load_tokenizer(config.model)
    assert error.value.key == "model.name_or_path"
    with pytest.raises(ConfigError, match="cannot read the model's config in"):
        build_model(config, tokenizer)


NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}


@pytest.mark.parametrize(
    ("quantized", "kept", "message"),
    [
        ({"quant_method": "fp8"}, "nf4", r"are quantised by fp8, and only NF4 .* name the model"),
        ({**NF4, "load_in_4bit": False}, "nf4", "are in bitsandbytes' 8 bits, and only"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "nf4", "are in fp4, and only NF4"),
        (
            {**NF4, "bnb_4bit_use_double_quant": False},
            "nf4",
            r"not quantised themselves \(bnb_4bit",
        ),
        (
            NF4,
            None,
            r"frozen_weights is None, but .* write model\.frozen_weights: nf4, which keeps",
        ),
        (NF4, "int8", r"frozen_weights is 'int8', but .* write model\.frozen_weights: nf4, which"),
    ],
)
def test_weights_that_are_quantised_otherwise_are_refused(
    tmp_path: Path,
    model_directory: Path,
    tokenizer: Any,
    quantized: dict[str, Any],
    kept: Any,
    message: str,
) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = quantized
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = run_config(tmp_path, lora=None)
    asked = dataclasses.replace(config.model, frozen_weights=kept)
    with pytest.raises(ConfigError, match=message):
        build_model(dataclasses.replace(config, model=asked), tokenizer)


MXFP4_BASE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("kept", [None, "nf4", "mxfp4"])
def test_a_base_in_mxfp4_is_built_and_filled_from_its_files(
    tmp_path: Path, model_directory: Path, kept: Any
) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    write_model(tmp_path, gpt_oss(**MXFP4_BASE, pad_token_id=0))
    lora = {"r": 2, "target_modules": ["q_proj"]}
    shape = {"dtype": "bfloat16", "frozen_weights": kept, "attn_implementation": "eager"}
    config = run_config(tmp_path, lora=lora, **shape)
    model: Any = build_model(config, load_tokenizer(config.model))
    assert not hasattr(model.config, "quantization_config")
    frozen = None if kept is None else FrozenInBytes(model, format_named(kept), data_parallel=None)
    materialize(model, device=torch.device("cpu"), data_parallel=None, frozen=frozen)
    experts = model.base_model.model.model.layers[1].mlp.experts
    written = load_file(tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(
        *(written[f"model.layers.1.mlp.experts.down_proj_{part}"] for part in ("blocks", "scales"))
    )
    if kept == "mxfp4":
        # The makers left attention as it is, so it stays so.
        assert frozen is not None
        assert sorted(n.rpartition(".")[2] for n in frozen.names) == 2 * ["down_proj"] + 2 * [
            "gate_up_proj"
        ]
        assert experts.down_proj.dtype == torch.uint8
        found = format_named("mxfp4_transposed").dequantize(
            experts.down_proj.data, expected.shape, torch.bfloat16
        )
    else:
        found = experts.down_proj.data
    assert torch.equal(found, expected)


def test_a_plan_takes_the_quantisation_of_the_files_from_the_run_file() -> None:
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": UNQUANTIZED}
    shape = {**MIXTURE, "model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 32}
    names = []
    for more in ({"quantization_config": quantized}, {}):
        config = run_config(
            Path("org/a"),
            lora=None,
            architecture=shape | more,
            frozen_weights="mxfp4",
            attn_implementation="eager",
        )
        model = describe_model(config).requires_grad_(requires_grad=False)
        frozen = FrozenInBytes(model, format_named("mxfp4"), data_parallel=None)
        names.append(
            {name.rpartition("layers.0.")[2] for name in frozen.names if "layers.0." in name}
        )
    experts = {"mlp.experts.down_proj", "mlp.experts.gate_up_proj"}
    linears = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert names == [experts, experts | linears]


def copy_with_generation(model_directory: Path, tmp_path: Path, **values: Any) -> Path:
    shutil.copytree(model_directory, tmp_path / "model")
    text = json.dumps(values)
    (tmp_path / "model" / "generation_config.json").write_text(text, encoding="utf-8")
    return tmp_path / "model"


def test_the_model_keeps_how_it_generates(
    model_directory: Path, tokenizer: Any, tmp_path: Path
) -> None:
    directory = copy_with_generation(
        model_directory, tmp_path, eos_token_id=[1, 3], do_sample=True, temperature=0.7
    )
    model: Any = build_model(run_config(directory, lora=None), tokenizer)
    generation = model.generation_config
    assert (generation.eos_token_id, generation.temperature) == ([1, 3], 0.7)
    # Without a key-value cache generation takes quadratic time.
    assert model.config.use_cache
    assert generation.use_cache is not False


def test_a_generation_config_that_cannot_be_written_again_is_not_kept(
    model_directory: Path, tokenizer: Any, tmp_path: Path
) -> None:
    directory = copy_with_generation(model_directory, tmp_path, do_sample=False, temperature=0.7)
    with pytest.warns(UserWarning, match=r"generation_config\.json is not kept, because transf"):
        model: Any = build_model(run_config(directory, lora=None), tokenizer)
    model.generation_config.save_pretrained(tmp_path)


@pytest.mark.parametrize("numbers", ["added", "left out"])
def test_a_token_without_an_embedding_is_refused(
    model_directory: Path, tmp_path: Path, numbers: str
) -> None:
    shutil.copytree(model_directory, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if numbers == "left out":  # fewer tokens than embeddings, but one with a high number
        vocabulary[max(vocabulary, key=vocabulary.get)] = 400
    else:
        vocabulary.update({f"new{number}": number for number in range(len(vocabulary), 401)})
    file.write_text(json.dumps(content), encoding="utf-8")
    config = run_config(tmp_path / "model", lora=None)
    with pytest.raises(ConfigError, match=r"from 0 to 400, but the model has 320 embeddings; rem"):
        build_model(config, load_tokenizer(config.model))


def test_a_model_is_described_without_its_files_by_its_architecture() -> None:
    fields = {"r": 2, "target_modules": ["q_proj"]}
    config = run_config(
        Path("org/not-here"), lora=fields, architecture={**llama_config(), "model_type": "llama"}
    )
    model = describe_model(config)
    assert all(p.is_meta for p in model.parameters())
    formats = {p.requires_grad: p.dtype for p in model.parameters()}
    assert formats == {True: torch.float32, False: torch.bfloat16}


def test_a_directory_says_what_its_model_looks_like(model_directory: Path) -> None:
    model: Any = describe_model(run_config(model_directory, lora=None))
    assert model.config.vocab_size == VOCAB_SIZE


def test_a_description_downloads_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"a plan of org/model needs its config, and downloads noth"
    ):
        describe_model(run_config(Path("org/model"), lora=None))


def test_a_model_of_another_shape_than_the_run_file_says_is_refused(
    model_directory: Path, tokenizer: Any
) -> None:
    shape = {**llama_config(), "model_type": "llama"}
    build_model(run_config(model_directory, lora=None, architecture=shape), tokenizer)
    wrong = {**shape, "hidden_size": 64}
    with pytest.raises(
        ConfigError, match=r"architecture\.hidden_size is 64, but .* has 32; correct"
    ):
        build_model(run_config(model_directory, lora=None, architecture=wrong), tokenizer)


def test_an_architecture_is_checked_as_a_config_is() -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture\.model_type is 'lama', which"):
        describe_model(run_config(Path("org/a"), lora=None, architecture={"model_type": "lama"}))


MIXTURE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_keys_that_only_the_models_code_reads_are_taken() -> None:
    """Qwen3-MoE's published config.json has a `head_dim`, which its config class does not declare."""
    shape = {**MIXTURE, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4}
    model: Any = describe_model(run_config(Path("org/a"), lora=None, architecture=shape))
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (64, 32)
    wrong = {**shape, "head_dims": 16}
    with pytest.raises(ConfigError, match="head_dims"):
        describe_model(run_config(Path("org/a"), lora=None, architecture=wrong))


WITH_SINKS = {
    **MIXTURE,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "intermediate_size": 32,
}


def test_attention_that_transformers_does_not_have_is_named() -> None:
    shape = {"architecture": WITH_SINKS, "attn_implementation": "sdpa"}
    with pytest.raises(ConfigError, match="attn_implementation: eager") as error:
        describe_model(run_config(Path("org/a"), lora=None, **shape))
    assert error.value.key == "model.attn_implementation"


@pytest.mark.parametrize(
    ("model_type", "kind", "mask"),
    [("gpt_oss", "eager", "additive"), ("llama", "sdpa", "boundaries")],
)
def test_attention_is_what_transformers_has_for_the_model(
    model_type: str, kind: str, mask: str
) -> None:
    shape = WITH_SINKS if model_type == "gpt_oss" else {**llama_config(), "model_type": model_type}
    config = run_config(Path("org/a"), lora=None, architecture=shape)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=True))
    model: Any = describe_model(config)
    assert model.config._attn_implementation == kind
    chosen = with_attention(config, fetches=False)
    assert chosen.model.attn_implementation == kind
    assert mask_kind(chosen) == mask
