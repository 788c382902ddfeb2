"""Registers the strategy's name with Lightning Fabric without importing Fabric.

PyTorch calls `install` at the end of `import torch` (the `torch.backends` entry point), and
`import thunder_memsave` calls it too. It imports nothing beyond the standard library: when Fabric
imports its strategies, the name is added to their registry, and the strategy's own code is imported
when Fabric instantiates the name. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` is PyTorch's switch to leave
the entry point out; an explicit `import thunder_memsave` registers the name regardless.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder_memsave.strategy import ThunderMemsaveStrategy

STRATEGY_NAME = "thunder_memsave"
DESCRIPTION = "FSDP + Thunder within a memory budget"
REGISTRY_MODULE = "lightning.fabric.strategies"

_log = logging.getLogger(__name__)


def install() -> None:
    """Register the name now if Fabric's registry is loaded, else as soon as it is.

    Never raises: PyTorch runs this inside `import torch`, where an exception would make PyTorch
    unusable for programs that have nothing to do with us.
    """
    module = sys.modules.get(REGISTRY_MODULE)
    if module is not None and hasattr(module, "STRATEGY_REGISTRY"):
        _register(module)
    elif not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())


def create_strategy(**init_params: object) -> ThunderMemsaveStrategy:
    """Import the strategy on first use; the registry calls this."""
    from thunder_memsave.strategy import ThunderMemsaveStrategy

    return ThunderMemsaveStrategy(**init_params)  # type: ignore[arg-type]


class _RegisterOnImport(MetaPathFinder):
    """Lets the other finders find the registry's module and registers once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY_MODULE:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._register_after_exec(spec)
                return spec
        return None

    def _register_after_exec(self, spec: ModuleSpec) -> None:
        # The loader keeps its type (inspect and importlib.resources look at it): only this
        # instance's method is replaced, and only until the module has run.
        loader = spec.loader
        exec_module: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)

        def exec_and_register(module: ModuleType) -> None:
            assert exec_module is not None
            exec_module(module)
            if module.__name__ == REGISTRY_MODULE:  # zipimport shares one loader
                vars(loader).pop("exec_module", None)
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                _register(module)

        try:
            vars(loader)["exec_module"] = exec_and_register
        except TypeError:  # a loader without a __dict__ cannot be hooked
            _log.warning("%s: put `import thunder_memsave` after its import", REGISTRY_MODULE)


def _register(module: ModuleType) -> None:
    registry = getattr(module, "STRATEGY_REGISTRY", None)
    if registry is None or not hasattr(registry, "register"):
        _log.warning(
            "%s has no STRATEGY_REGISTRY; pass a ThunderMemsaveStrategy instance", REGISTRY_MODULE
        )
        return
    if STRATEGY_NAME not in registry:
        registry.register(STRATEGY_NAME, create_strategy, description=DESCRIPTION)
