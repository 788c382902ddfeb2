from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from harness.fabric import make_fabric
from harness.language_model import loss_sum, sample_of, write_model
from thunder_memsave.finetune.data.packing import Batch, pad
from thunder_memsave.finetune.export.export import export
from thunder_memsave.finetune.model.build import build_model, load_tokenizer, precision_of
from thunder_memsave.finetune.run_file.config import (
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

SEED = 5
TARGET = {"target_modules": ["q_proj"]}
# peft advises against training one of two tied weights, but the user may know better.
TIED = pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")
METHODS: dict[str, dict[str, Any]] = {
    "C3AConfig": {"block_size": 8},
    "GraloraConfig": {"r": 4, "gralora_k": 2},
    "IA3Config": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "MissConfig": {"r": 4},
    "RoadConfig": {"group_size": 8},
    "VeraConfig": {"r": 4},
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer; the output layer is tied to the embedding."""
    directory = tmp_path_factory.mktemp("small")
    return write_model(directory, num_hidden_layers=1, tie_word_embeddings=True)


def run(directory: Path, lora: Any = None, adapter: Any = None, **model: Any) -> RunConfig:
    model = {"dtype": "float32", **model}
    return RunConfig(
        model=ModelConfig(name_or_path=str(directory), **model),
        data=DataConfig(max_seq_length=16),
        train=TrainConfig(seed=SEED),
        lora=lora,
        adapter=adapter,
    )


def built(config: RunConfig) -> Any:
    return build_model(config, load_tokenizer(config.model))


def eager(config: RunConfig, adapter: peft.PeftConfig) -> Any:
    """Take the same step with plain transformers and peft."""
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path, dtype=dtype)
    torch.manual_seed(SEED)
    return peft.get_peft_model(model, adapter)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 300, (length,), generator=generator).tolist() for length in (9, 16)]
    return pad([sample_of(ids) for ids in rows], length=16, pad_id=0).lay_out([0, 1])


@torch.no_grad()
def perturbed(parameter: nn.Parameter) -> Tensor:
    """Move the adapter away from its start, where half of its weights are zero."""
    return parameter.add_(torch.randn_like(parameter), alpha=0.05)


def assert_one_step_is_eager(
    config: RunConfig, adapter: peft.PeftConfig, *, same_start: bool, tolerance: float = 1e-5
) -> tuple[Fabric, nn.Module]:
    model, reference = built(config), eager(config, adapter)
    fabric = make_fabric(precision=precision_of(config))
    module = fabric.setup(model)
    assert trained(model).keys() == trained(reference).keys()
    for name, parameter in trained(reference).items():
        if same_start:
            assert torch.equal(trained(model)[name], parameter), name
        parameter.data.copy_(perturbed(trained(model)[name]))
    batch = make_batch()
    measured = loss_sum(module, batch, mask="none")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision_of(config) == "bf16-mixed"):
        expected = loss_sum(reference, batch, mask="none")
    torch.testing.assert_close(measured, expected, rtol=tolerance, atol=tolerance)
    fabric.backward(measured)
    expected.backward()
    for name, parameter in trained(reference).items():
        torch.testing.assert_close(
            trained(model)[name].grad,
            parameter.grad,
            rtol=tolerance * 10,
            atol=tolerance,
            check_dtype=False,  # peft leaves a saved module in its model's dtype
        )
    return fabric, module


@pytest.mark.parametrize("method", METHODS)
def test_a_method_starts_and_steps_as_in_eager_peft_and_is_exported(
    small_model: Path, tmp_path: Path, method: str
) -> None:
    arguments = {**TARGET, **METHODS[method]}
    config = run(small_model, adapter={"class_path": method, "init_args": arguments})
    config_of_peft = getattr(peft, method)(task_type="CAUSAL_LM", **arguments)
    fabric, module = assert_one_step_is_eager(config, config_of_peft, same_start=True)
    export(fabric, module, None, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(small_model)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        losses = [
            float(loss_sum(each.eval(), make_batch(), mask="none")) for each in (module, loaded)
        ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 4, "use_rslora": True, "target_modules": "all-linear"},
        {"r": 4, "bias": "all", "layers_to_transform": [0], **TARGET},
        {"r": 4, "use_dora": True, **TARGET},
        {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"], **TARGET},
    ],
    ids=["rslora", "biases", "dora", "saved modules"],
)
@TIED
def test_variants_of_lora_step_as_in_eager_peft(small_model: Path, fields: Any) -> None:
    config_of_peft = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    assert_one_step_is_eager(run(small_model, lora=fields), config_of_peft, same_start=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_magnitudes_of_dora_start_as_in_eager_peft(small_model: Path, dtype: str) -> None:
    fields: dict[str, Any] = {"r": 4, "use_dora": True, **TARGET}
    config = run(small_model, lora=fields, dtype=dtype)
    model = built(config)
    make_fabric(precision=precision_of(config)).setup(model)
    expected = trained(eager(config, peft.LoraConfig(task_type="CAUSAL_LM", **fields)))
    found = {name: p for name, p in trained(model).items() if "magnitude" in name}
    assert len(found) == 1
    for name, p in found.items():
        assert p.dtype == expected[name].dtype == torch.float32
        assert torch.equal(p, expected[name]), name


@pytest.mark.parametrize(
    "fields",
    [{"r": 4, **TARGET}, {"r": 4, "modules_to_save": ["lm_head"], **TARGET}],
    ids=["lora", "saved output layer"],
)
@TIED
def test_trained_weights_are_float32_over_a_frozen_bfloat16_model(
    small_model: Path, fields: Any
) -> None:
    config = run(small_model, lora=fields, dtype="bfloat16")
    assert precision_of(config) == "bf16-mixed"
    config_of_peft = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    # Eager and compiled code round to bfloat16 at different places.
    _, module = assert_one_step_is_eager(config, config_of_peft, same_start=False, tolerance=2e-2)
    assert {p.dtype for p in trained(module).values()} == {torch.float32}
    assert {p.grad.dtype for p in trained(module).values() if p.grad is not None} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_dropout_is_drawn_in_training_only(small_model: Path) -> None:
    model = built(run(small_model, lora={"r": 4, "lora_dropout": 0.5, **TARGET}))
    module = make_fabric().setup(model)
    with torch.no_grad():
        for parameter in trained(model).values():
            perturbed(parameter)
        batch = make_batch()
        losses = [float(loss_sum(module.train(), batch, mask="none")) for _ in range(2)]
        evaluated = [float(loss_sum(module.eval(), batch, mask="none")) for _ in range(2)]
        expected = float(loss_sum(model.eval(), batch, mask="none"))
    assert losses[0] != losses[1]
    assert evaluated == pytest.approx([expected] * 2, rel=1e-5)


def lora(**fields: Any) -> dict[str, Any]:
    return {"lora": fields}


def adapter(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"adapter": {"class_path": class_path, "init_args": arguments}}


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        (adapter("LoHaConfig"), "adapter.class_path", "choose their way by the value"),
        (adapter("FourierFTConfig"), "adapter.class_path", "no run with it was compared"),
        (adapter("PrefixTuningConfig"), "adapter.class_path", "it adds positions to every row"),
        (adapter("PveraConfig"), "adapter.class_path", "no run with it was compared .* Use one of"),
        (adapter("PeftModel"), "adapter.class_path", "is not a config class of peft; name one of"),
        (adapter("LoHConfig"), "adapter.class_path", "but peft has no such class; did you mean"),
        (adapter("MissConfig", rank=3), "adapter.init_args.rank", "rank"),
        ({**adapter("MissConfig"), **lora(r=2)}, "adapter", "adapter and lora are both given"),
        (lora(init_lora_weights="pissa"), "lora.init_lora_weights", "must be true or 'gaussian'"),
        (lora(init_lora_weights=False), "lora.init_lora_weights", "change what the model computes"),
        (lora(loftq_config={"loftq_bits": 4}), "lora.loftq_config", "read after the adapter is"),
        (lora(target_parameters=["q_proj.weight"]), "lora.target_parameters", "changes param"),
        (lora(trainable_token_indices=[1]), "lora.trainable_token_indices", "use modules_to_save"),
        (lora(layer_replication=[[0, 1]]), "lora.layer_replication", "not in the model's files"),
        (lora(r=0), "lora.r", "lora.r is 0, but must be positive"),
        (lora(lora_alpha=-1), "lora.lora_alpha", "lora.lora_alpha is -1, but must be positive"),
        (lora(lora_dropout=1.0), "lora.lora_dropout", "must be at least 0 and below 1"),
        (lora(task_type="SEQ_CLS"), "lora.task_type", "the models here are causal language models"),
        (lora(inference_mode=True), "lora.inference_mode", "nothing would be trained"),
        (lora(target_modules=["q_porj"]), "lora.target_modules", "did you mean 'q_proj'"),
        (
            lora(modules_to_save=["head"]),
            "lora.modules_to_save",
            "has 'head', but the model has no",
        ),
        (lora(layers_to_transform=[0, 1]), "lora.layers_to_transform", "layers are 0 to 0"),
        (lora(target_modules=["embed_tokens"]), "lora.target_modules", "embedding .* cannot be"),
        (lora(target_modules="x["), "lora", "peft refuses the section 'lora'"),
    ],
)
@TIED
def test_what_cannot_be_trained_is_refused_by_name(
    small_model: Path, section: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        built(run(small_model, **section))
    problems = getattr(error.value, "problems", (error.value,))
    assert [problem.key for problem in problems] == [key]


def test_all_that_is_wrong_with_a_section_is_reported_at_once(small_model: Path) -> None:
    with pytest.raises(ConfigErrors) as error:
        built(run(small_model, lora={"layer_replication": [[0, 1]], "r": -1, "lora_dropout": 2.0}))
    keys = {problem.key for problem in error.value.problems}
    assert keys == {"lora.layer_replication", "lora.r", "lora.lora_dropout"}
