"""The strategy's name resolves without an import of ours; each script has a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest

BY_NAME = "Fabric(strategy='thunder_memsave', accelerator='cpu', devices=1)"
LOADED = "sorted(n for n in sys.modules if n.split('.')[0] in ('lightning', 'thunder'))"


def run_python(script: str, **env: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a process sees that imports torch, then Lightning, and at last uses the name."""
    script = f"""
        import json, sys
        import torch
        seen = {{"after torch": ["thunder_memsave" in sys.modules, {LOADED}]}}
        import lightning.fabric.strategies as strategies
        hooks = [f for f in sys.meta_path if "thunder_memsave.autoload" in type(f).__module__]
        seen["traces"] = [len(hooks), "exec_module" in vars(strategies.__loader__)]
        from lightning.fabric import Fabric
        seen["strategy"] = [n in sys.modules for n in ("thunder_memsave.strategy", "thunder")]
        from thunder_memsave.autoload import install
        install(); install()
        seen["registered"] = list(strategies.STRATEGY_REGISTRY).count("thunder_memsave")
        seen["by name"] = type({BY_NAME}.strategy).__name__
        print(json.dumps(seen))
    """
    return dict(json.loads(run_python(script)))


def test_the_name_resolves_without_importing_the_package(seen: dict[str, Any]) -> None:
    assert seen["by name"] == "ThunderMemsaveStrategy"


def test_the_switch_turns_the_entry_point_off() -> None:
    script = """
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        print("thunder_memsave" in STRATEGY_REGISTRY)
    """
    assert run_python(script) == "True"
    assert run_python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


@pytest.mark.parametrize("first", ["thunder_memsave", "lightning.fabric.strategies"])
def test_an_import_registers_the_name_in_either_order(first: str) -> None:
    script = f"""
        import {first}
        import thunder_memsave
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        print("thunder_memsave" in STRATEGY_REGISTRY)
    """
    assert run_python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True"


def test_importing_torch_loads_neither_thunder_nor_lightning(seen: dict[str, Any]) -> None:
    assert seen["after torch"] == [True, []]


def test_importing_the_package_loads_no_torch() -> None:
    script = f"""
        import sys
        import thunder_memsave
        print("torch" in sys.modules, {LOADED}, thunder_memsave.__version__ != "")
    """
    assert run_python(script) == "False [] True"


def test_torch_works_where_lightning_is_not_installed() -> None:
    script = """
        import sys
        sys.modules["lightning"] = None
        import torch
        print(torch.ones(2).sum().item())
    """
    assert run_python(script) == "2.0"


def test_the_entry_point_takes_less_than_5_ms() -> None:
    # CPU time, and the best of five: other work on the machine is not what is measured.
    script = """
        import time, torch
        start = time.process_time()
        from thunder_memsave.autoload import install
        install()
        print(time.process_time() - start)
    """
    times = [float(run_python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) for _ in range(5)]
    assert min(times) < 5e-3


def test_the_hook_leaves_no_trace_once_the_registry_is_loaded(seen: dict[str, Any]) -> None:
    assert seen["traces"] == [0, False]


def test_only_the_use_of_the_name_imports_the_strategy(seen: dict[str, Any]) -> None:
    assert seen["strategy"] == [False, False]


def test_a_registry_of_another_shape_warns_and_does_not_break_the_import() -> None:
    script = """
        import logging, sys, types
        import thunder_memsave.autoload as autoload
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        autoload._register(types.ModuleType("lightning.fabric.strategies"))
    """
    assert "has no STRATEGY_REGISTRY" in run_python(script)


def test_a_second_registration_is_harmless(seen: dict[str, Any]) -> None:
    assert seen["registered"] == 1


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import thunder_memsave

    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        thunder_memsave.Strategy  # noqa: B018
