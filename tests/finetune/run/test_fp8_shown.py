"""A run describes which linears compute in fp8, and a plan counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harness.language_model import run_values, write_run_file
from thunder_memsave.config import Fp8Config
from thunder_memsave.finetune.model.build import describe_model
from thunder_memsave.finetune.plan.fp8_planned import refuse_without_fp8
from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.run.describe_job import describe_job
from thunder_memsave.finetune.run.fp8_shown import bytes_shown, describe_choices
from thunder_memsave.finetune.run.job import prepare
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.fp8.weights.layers import Choice
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.settings.problems import ConfigError

NOT_ADAPTERS = "{backend: torch, amax_history_len: 4, skip_modules: [lm_head, lora_A, lora_B]}"

Read = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_long_search_for_the_smallest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan counts is known before, and nothing here reads the smallest budget."""
    monkeypatch.setattr("thunder_memsave.finetune.plan.run_planner._SMALLEST_S", 0.01)


@pytest.fixture
def config_of(tmp_path: Path, model_directory: Path) -> Read:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    return lambda *overrides: load_run_config(path, list(overrides))


def test_layers_that_differ_by_their_number_are_named_once() -> None:
    names = [f"model.layers.{i}.mlp.{name}" for i in range(2) for name in ("up", "down")]
    choices = [Choice(name=name, reason=None) for name in names]
    choices += [Choice(name="model.layers.2.mlp.up", reason="it is small")]
    choices += [Choice(name="base_model.model.lm_head", reason="skip_modules has 'lm_head'")]
    assert describe_choices(choices, recipe="delayed", backend="torch").splitlines() == [
        "4 of 6 linears, delayed scaling by torch (mlp.up, mlp.down)",
        "not 1 (mlp.up): it is small",
        "not 1 (lm_head): skip_modules has 'lm_head'",
    ]


def test_linears_whose_inputs_are_no_whole_blocks_are_named_once() -> None:
    config = RunConfig(model=ModelConfig(name_or_path="a", frozen_weights="mxfp4"))
    layers = [nn.ModuleDict({"up": nn.Linear(64, 48), "down": nn.Linear(48, 64)}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)}).requires_grad_(requires_grad=False)
    num_bytes = 2 * (64 * 48 // 2 + 64 * 48 // 32)
    assert bytes_shown(config, model) == (
        f"2 frozen weights kept in {num_bytes:,} bytes (MXFP4), not 2 (down): inputs are no multiple of 32"
    )


def test_of_many_names_the_first_are_shown() -> None:
    choices = [Choice(name=f"a{i}", reason=None) for i in range(10)]
    choices += [Choice(name=f"b{i}", reason="why") for i in range(4)]
    first, second = describe_choices(choices, recipe="block", backend="torch").splitlines()
    assert first.endswith("(a0, a1, a2, a3, a4, a5, a6, a7 and 2 more)")
    assert second == "not 4 (b0, b1 and 2 more): why"


def test_a_run_says_which_linears_compute_in_fp8_and_why_the_others_do_not(
    config_of: Read,
) -> None:
    job = prepare(config_of(f"fp8={NOT_ADAPTERS}", "fp8.skip_modules=[lm_head, lora_A]"))
    assert job.fp8 is not None
    lines = job.fp8.splitlines()
    assert lines[0].startswith("14 of 43 linears, delayed scaling by torch (self_attn.q_proj, self")
    assert (
        "not 14 (self_attn.q_proj.lora_A.default, self_attn.k_proj.lora_A.default and 5 mor"
        in (lines[1])
    )
    assert "): 4 -> 32 features are no multiples of 16" in job.fp8
    assert lines[-1] == "not 1 (lm_head): skip_modules has 'lm_head'"
    assert "\nfp8:       14 of 43 linears" in describe_job(job)


def test_a_run_without_fp8_says_nothing_of_it(config_of: Read) -> None:
    job = prepare(config_of())
    assert job.fp8 is None
    assert "\nfp8:" not in describe_job(job)


def test_a_monitor_of_scales_without_fp8_is_refused(config_of: Read) -> None:
    message = "Fp8Monitor watches scales that change from step to step, but there is no section fp8"
    with pytest.raises(ConfigError, match=message):
        prepare(config_of("callbacks=[{class_path: Fp8Monitor}]"))


def test_scales_of_each_rank_alone_are_refused_with_two_ranks(config_of: Read) -> None:
    message = (
        r"fp8\.reduce_amax is false, and there are 2 ranks, each of which would have scales of its own, .*: a resumed "
        r"run would not be the one that was saved; leave reduce_amax out, which is true then, or train on one rank\."
    )
    config = config_of("fp8={reduce_amax: false}", "devices=2")
    with pytest.raises(ConfigError, match=message):
        prepare(config)
    with pytest.raises(ConfigError, match=message):
        plan_run(config, device=DEVICES["cpu"], num_ranks=2, has_curve=False)
    assert prepare(config_of("fp8={reduce_amax: false}", "devices=1")).fp8 is not None


def test_a_plan_counts_frozen_weights_in_fp8_twice_and_their_state(config_of: Read) -> None:
    config = config_of(f"fp8={NOT_ADAPTERS}")
    plan = plan_run(config, device=DEVICES["cpu"], num_ranks=1, has_curve=False)
    # Per layer 32x32 twice, 16x32 twice, 32x64 three times; by rows and by columns, one scale each.
    elements = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    scales, states = 14 * 4, 14 * 4 * (4 * 2 + 2 + 4 * 1 + 1)
    # The columns of the first layer's q, k and v are not needed: nothing before them is trained.
    unused = 32 * 32 + 2 * 16 * 32
    buffers = dict(describe_model(config).named_buffers())
    of_model = sum(b.nbytes for name, b in buffers.items() if name.endswith(".inv_freq"))
    found = plan.call.profile.peak_bytes_by_kind["buffer"]
    assert found == of_model + 2 * elements - unused + scales + states


def test_a_plan_for_blackwell_counts_a_byte_of_scale_for_each_32_numbers_in_mxfp8(
    config_of: Read,
) -> None:
    config = config_of("fp8={recipe: mxfp8, skip_modules: [lm_head, lora_A, lora_B]}")
    plan = plan_run(config, device=DEVICES["b200"], num_ranks=1, has_curve=False)
    # Per layer 32x32 twice and 32x64 three times; the 16 outputs of k and v are no whole block.
    sizes = 2 * [32 * 32, 32 * 32, 32 * 64, 32 * 64, 32 * 64]
    sizes += sizes[
        1:
    ]  # by rows, and by columns but for the first q, before which nothing is trained
    buffers = dict(describe_model(config).named_buffers())
    sizes += [n // 32 for n in sizes]
    sizes += [b.nbytes for name, b in buffers.items() if name.endswith(".inv_freq")]
    found = plan.call.profile.peak_bytes_by_kind["buffer"]
    # On CUDA, the allocator takes multiples of 512 bytes.
    assert found == sum(-(-size // 512) * 512 for size in sizes)


def test_a_plan_for_blackwell_counts_half_a_byte_for_each_number_in_nvfp4(
    config_of: Read,
) -> None:
    fp8 = "fp8={recipe: nvfp4, skip_modules: [lm_head, lora_A, lora_B]}"
    config = config_of(fp8, "model.dtype=bfloat16")
    plan = plan_run(config, device=DEVICES["b200"], num_ranks=1, has_curve=False)
    # Per layer 32x32 twice and 32x64 three times; the 16 outputs of k and v are no multiple of 32.
    sizes = 2 * [32 * 32, 32 * 32, 32 * 64, 32 * 64, 32 * 64]
    both = sizes + sizes[1:]  # by columns but for the first q, before which nothing is trained
    buffers = dict(describe_model(config).named_buffers())
    # Numbers, scales in a byte, and one amax for both directions.
    bytes_of = [n // 2 for n in both] + [n // 16 for n in both] + [4] * len(sizes)
    bytes_of += [b.nbytes for name, b in buffers.items() if name.endswith(".inv_freq")]
    found = plan.call.profile.peak_bytes_by_kind["buffer"]
    assert found == sum(-(-size // 512) * 512 for size in bytes_of)


def test_a_plan_counts_frozen_weights_that_are_kept_in_fp8_alone_once(config_of: Read) -> None:
    found = {}
    for kept in ("compute", "fp8"):
        config = config_of(
            f"fp8={NOT_ADAPTERS}",
            f"fp8.frozen_weights={kept}",
            "model.dtype=bfloat16",
            "strategy.sharding=zero3",
        )
        plan = plan_run(config, device=DEVICES["cpu"], num_ranks=2, has_curve=False)
        found[kept] = plan.call.profile.peak_bytes_by_kind
    elements = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    # Half of the elements on each rank, each a byte smaller; 14 scales.
    assert found["compute"]["parameter"] - found["fp8"]["parameter"] == elements // 2
    assert found["fp8"]["buffer"] - found["compute"]["buffer"] == 14 * 4
    alone = plan_run(config, device=DEVICES["cpu"], num_ranks=1, has_curve=False)
    # Copies neither by rows nor by columns.
    assert alone.call.profile.peak_bytes_by_kind["buffer"] == found["fp8"]["buffer"]


def test_a_plan_counts_the_workspace_of_transformer_engine_where_it_may_compute(
    config_of: Read,
) -> None:
    held = {}
    for backend in ("auto", "transformer_engine", "torch"):
        config = config_of(
            f"fp8={NOT_ADAPTERS}", f"fp8.backend={backend}", "memory.policy=keep_all"
        )
        plan = plan_run(config, device=DEVICES["h200"], num_ranks=1, has_curve=False)
        held[backend] = plan.call.memory.other_bytes
    assert held["auto"] == held["transformer_engine"] == held["torch"] + 32 * 2**20 + 1024


def test_frozen_weights_in_fp8_alone_of_a_run_that_freezes_none_are_refused(
    config_of: Read,
) -> None:
    config = config_of("fp8={backend: torch, frozen_weights: fp8}", "lora=null")
    message = "the model has no linear in fp8 whose weight is frozen and its own; leave frozen_wei"
    with pytest.raises(ConfigError, match=message):
        prepare(config)
    with pytest.raises(ConfigError, match=message):
        plan_run(config, device=DEVICES["cpu"], num_ranks=1, has_curve=False)


@pytest.mark.parametrize("asked", [{}, {"backend": "transformer_engine"}, {"recipe": "mxfp8"}])
def test_a_plan_for_a_device_without_fp8_is_refused(asked: Any) -> None:
    message = (
        r"^fp8 is set, but nothing computes in fp8 below compute capability 8\.9 \(Ada\), and there is the device a100 "
        r"\(compute capability 8\.0\): leave out `fp8`; or plan for another --device\.$"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_without_fp8(Fp8Config(**asked), DEVICES["a100"])
    assert caught.value.key == "fp8"
    refuse_without_fp8(None, DEVICES["a100"])
    refuse_without_fp8(Fp8Config(), DEVICES["l40s"])


TE = "transformer_engine"


@pytest.mark.parametrize(
    ("backend", "recipe", "device", "reason"),
    [
        ("torch", "block", "b200", r"blocks on compute capability 9\.0 \(Hopper\).*: set `fp8.rec"),
        ("auto", "block", "l40s", r"torch\._scaled_mm multiplies such blocks on compute capabili"),
        (
            "auto",
            "mxfp8",
            "h100",
            r"mxfp8 needs compute capability 10\.0 \(Blackwell\), and there ",
        ),
        ("torch", "mxfp8", "b200", "TransformerEngine alone multiplies in mxfp8 on CUDA devices: "),
        (TE, "mxfp8", "h200", r"mxfp8 needs compute capability 10\.0 \(Blackwell\), and there is"),
        (
            "auto",
            "nvfp4",
            "h100",
            r"nvfp4 needs compute capability 10\.0 \(Blackwell\), and there ",
        ),
        ("torch", "nvfp4", "b200", "TransformerEngine alone multiplies in nvfp4 on CUDA devices: "),
        (TE, "nvfp4", "h200", r"nvfp4 needs compute capability 10\.0 \(Blackwell\), and there is"),
        (
            TE,
            "block",
            "l40s",
            r"TransformerEngine computes it from compute capability 9\.0 \(Hopper",
        ),
    ],
)
def test_a_plan_with_a_recipe_that_the_device_does_not_compute_is_refused(
    backend: Any, recipe: Any, device: str, reason: str
) -> None:
    asked = rf"^fp8\.backend is {backend} and fp8\.recipe is {recipe}, but "
    message = rf"{asked}.*{reason}.*; or plan for another --device\.$"
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_without_fp8(Fp8Config(backend=backend, recipe=recipe), DEVICES[device])
    assert caught.value.key == "fp8.recipe"


def test_a_plan_with_a_backend_that_the_device_does_not_have_is_refused() -> None:
    message = (
        r"TransformerEngine computes on CUDA devices: set `fp8\.backend: torch`; or plan for anot"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_without_fp8(Fp8Config(backend="transformer_engine"), DEVICES["cpu"])
    assert caught.value.key == "fp8.backend"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
def test_a_plan_for_blackwell_is_made_in_mxfp8_and_nvfp4(backend: Any, recipe: Any) -> None:
    refuse_without_fp8(Fp8Config(backend=backend, recipe=recipe), DEVICES["b200"])
    refuse_without_fp8(Fp8Config(recipe=recipe), DEVICES["cpu"])


@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
def test_a_plan_leaves_to_transformer_engine_what_only_it_can_say(backend: Any) -> None:
    refuse_without_fp8(Fp8Config(backend=backend, recipe="block"), DEVICES["b200"])
