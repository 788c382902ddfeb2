"""If TransformerEngine cannot compute, the error says what is installed and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from harness import te_on_cpu
from thunder_memsave.config import ConfigError, Fp8Config
from thunder_memsave.fp8.compute.backends import _best, require
from thunder_memsave.fp8.kernels import te_backend, te_library
from thunder_memsave.fp8.recipe import RecipeName
from thunder_memsave.measure.run_alone import environment

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
ABSENT = importlib.util.find_spec("transformer_engine") is None


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    te_library.loaded.cache_clear()


def refusal(recipe: RecipeName = "delayed", device: torch.device = CPU) -> str:
    with pytest.raises(ConfigError) as caught:
        require("transformer_engine", recipe, device)
    return str(caught.value)


@pytest.mark.skipif(not ABSENT, reason="TransformerEngine is installed")
def test_where_it_is_not_installed_the_extra_is_named() -> None:
    assert refusal() == (
        "fp8.backend is transformer_engine and fp8.recipe is delayed, but TransformerEngine is not installed: "
        "`pip install 'thunder-memsave[te]'` does so; or set `fp8.backend: torch`."
    )


@pytest.mark.skipif(not ABSENT, reason="TransformerEngine is installed")
def test_its_python_without_its_extension_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(te_on_cpu.FOLDER))
    message = refusal()
    version = importlib.metadata.version("transformer_engine")
    assert f"TransformerEngine {version} is installed, but cannot be loaded with PyTorch" in message
    assert "Found empty `transformer-engine` meta package installed" in message
    assert f"`pip install --no-build-isolation 'transformer-engine[pytorch]=={version}'`" in message


def test_the_version_that_is_emulated_is_one_that_the_extra_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = map(Requirement, project["optional-dependencies"]["te"])
    with te_on_cpu.transformer_engine():
        version = importlib.metadata.version("transformer_engine")
    assert extra.specifier.contains(version)
    assert Version(version) > te_library.MIN_VERSION


def test_an_old_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.9.0")
    message = refusal()
    assert (
        "TransformerEngine 2.9.0 is installed, and 2.10 or newer is needed, whose GEMM has a workspace of"
        in message
    )


@pytest.mark.usefixtures("transformer_engine")
def test_a_version_whose_blocks_are_of_another_format_computes_the_other_recipes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(te_backend, "installed_version", lambda: Version("2.11"))
    require("transformer_engine", "delayed", CPU)
    require("transformer_engine", "current", CPU)
    for recipe in ("block", "mxfp8"):
        message = refusal(recipe)
        assert (
            "TransformerEngine 2.11 is installed, whose tensors with scales of blocks are of another for"
            in message
        )
        assert (
            "`pip install 'transformer-engine[pytorch]>=2.12'`, or set `fp8.recipe: current`; or set `fp8.ba"
            in message
        )


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_a_version_that_casts_no_weights_to_nvfp4_by_columns_alone_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(te_backend, "installed_version", lambda: Version("2.16.1"))
    require("transformer_engine", "mxfp8", CPU)
    assert (
        "TransformerEngine 2.16.1 is installed, which casts no weights to nvfp4 by columns alone: `pip install "
        "'transformer-engine[pytorch]>=2.17'`, or set `fp8.recipe: current`; or set `fp8.backend: torch`."
    ) in refusal("nvfp4")


def test_on_the_cpu_it_computes_nothing() -> None:
    with te_on_cpu.transformer_engine():
        message = refusal()
    te_library.loaded.cache_clear()
    assert "TransformerEngine computes on CUDA devices, and the model is on cpu; or set" in message


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        ("delayed", "is_fp8_available"),
        ("current", "is_fp8_available"),
        ("block", "is_fp8_block_scaling_available"),
        ("mxfp8", "is_mxfp8_available"),
        ("nvfp4", "is_nvfp4_available"),
    ],
)
def test_a_chip_or_cuda_that_cannot_is_named_with_its_reason(
    transformer_engine: ModuleType, monkeypatch: pytest.MonkeyPatch, recipe: RecipeName, asked: str
) -> None:
    monkeypatch.setattr(
        transformer_engine, asked, lambda return_reason: (False, "8.9 or higher required")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert (
        "but NVIDIA A100 (compute capability 8.0, with CUDA 12.8) cannot compute it: "
        "TransformerEngine says '8.9 or higher required'; or set `fp8.backend: torch`."
    ) in refusal(recipe)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_what_can_compute_is_not_refused_with_emulated_kernels(recipe: RecipeName) -> None:
    require("transformer_engine", recipe, CPU)


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_blackwell_computes_mxfp8_and_nvfp4_with_emulated_kernels() -> None:
    require("transformer_engine", "mxfp8", CPU)
    require("transformer_engine", "nvfp4", CPU)


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_a_chip_on_which_it_rounds_by_no_instruction_is_refused_with_emulated_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX PRO 6000")
    reason = te_backend.why_not("nvfp4", torch.device("cuda"))
    assert reason is not None
    assert reason.startswith("nvfp4 needs the instructions of compute capability 10.x (Blackwell)")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    assert te_backend.why_not("nvfp4", torch.device("cuda")) is None


@pytest.mark.skipif(not ABSENT, reason="TransformerEngine is installed")
def test_auto_says_why_it_does_not_take_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="thunder_memsave.fp8.compute.backends")
    assert _best(Fp8Config(), torch.device("cuda")) == "torch"
    assert (
        "fp8.backend 'auto' takes torch: TransformerEngine is not installed: "
        "`pip install 'thunder-memsave[te]'` does so"
    ) in caplog.messages


@pytest.mark.usefixtures("transformer_engine")
def test_auto_takes_it_where_it_can_compute_with_emulated_kernels() -> None:
    assert _best(Fp8Config(), torch.device("cuda")) == "transformer_engine"
    assert _best(Fp8Config(recipe="block"), CPU) == "torch"


def test_what_was_measured_with_one_version_is_not_used_with_another() -> None:
    with te_on_cpu.transformer_engine():
        found = environment()
        assert f", TransformerEngine {importlib.metadata.version('transformer_engine')}, " in found
    assert ("TransformerEngine" in environment()) == (not ABSENT)
