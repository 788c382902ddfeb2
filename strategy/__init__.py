"""Lightning Fabric strategy that trains within a memory budget.

    run file - finetune/ ---+
                            +-- strategy.py (Fabric's hooks; fabric/: the rest of its contract)
    Fabric(strategy=...) ---+        |
                                     v
    fabric/module_setup.py   `setup_module`, in this order:
      fp8/           backend, and frozen weights to be kept as fp8 numbers
      materialize/   a module on the meta device gets its values
      sharding/      parameters become shards, in place; distributed/: the ranks and their collectives
      compiler/      `CompiledModule` around it: nothing is compiled before the first call
                                     |  first call
                                     v
    frontend/      a call -> a torch-level graph (Dynamo, guards kept) -> a trace of ATen operators
    ops/, fp8/     the operations of a trace: ATen operators, kernels of ours, collectives
                                     v
    compiler/      the one ordered list of steps; passes/: trace -> trace, one file each
    budget/        a trace and a budget -> a plan that all ranks agree on
      measure/     what an operation takes, found without data
      planner/     what to keep, pure Python
                                     v
    one training step: forward, backward, clip, optimizer (optim/: those with states in fewer bits)
                                     v
    checkpoints/   atomic, sharded, resumable; callbacks/: what watches the loop
    eager_checkpoint.py   `checkpoint`: recomputation for eager code, which no plan covers
    compat/        work-arounds for torch and Thunder

Each package's `__init__.py` says what flows in and out. Which may import which is a contract in pyproject.toml:
the imports point down.

`import thunder_memsave` is cheap: it registers the strategy's name (`autoload.py`) and imports
PyTorch, Thunder and Lightning only when one of the public names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thunder_memsave.autoload import install as _install

if TYPE_CHECKING:
    from thunder_memsave.config import (
        CompileConfig,
        ConfigError,
        Fp8Config,
        MemoryConfig,
        ShardingConfig,
        StrategyConfig,
    )
    from thunder_memsave.eager_checkpoint import checkpoint
    from thunder_memsave.errors import BudgetError, ThunderMemsaveError
    from thunder_memsave.materialize.pending_weights import load_on_setup
    from thunder_memsave.strategy import ThunderMemsaveStrategy

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CompileConfig",
    "ConfigError",
    "Fp8Config",
    "MemoryConfig",
    "ShardingConfig",
    "StrategyConfig",
    "ThunderMemsaveError",
    "ThunderMemsaveStrategy",
    "__version__",
    "checkpoint",
    "load_on_setup",
]

_HOME = {
    "BudgetError": "thunder_memsave.errors",
    "CompileConfig": "thunder_memsave.config",
    "ConfigError": "thunder_memsave.config",
    "Fp8Config": "thunder_memsave.config",
    "MemoryConfig": "thunder_memsave.config",
    "ShardingConfig": "thunder_memsave.config",
    "StrategyConfig": "thunder_memsave.config",
    "ThunderMemsaveError": "thunder_memsave.errors",
    "ThunderMemsaveStrategy": "thunder_memsave.strategy",
    "checkpoint": "thunder_memsave.eager_checkpoint",
    "load_on_setup": "thunder_memsave.materialize.pending_weights",
}

_install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thunder_memsave' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
