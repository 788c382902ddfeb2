"""Callbacks for any Lightning Fabric loop that calls Lightning's hook names by `fabric.call`.

The loop passes keyword arguments (`TrainingHooks` lists them), of which each callback names those that it
needs. Callbacks that measure add to `metrics`, and come before those that write it.

A new one is a class in a file of its own here, without a base class, listed in `__all__` and docs/callbacks.md; if it
writes a file, `finetune/run/callbacks.py` says where in a run's directory.
"""

from typing import TYPE_CHECKING

from thunder_memsave.callbacks.checkpoint import ModelCheckpoint
from thunder_memsave.callbacks.control import TrainingControl
from thunder_memsave.callbacks.early_stopping import EarlyStopping
from thunder_memsave.callbacks.fp8 import Fp8Monitor
from thunder_memsave.callbacks.gradient_norm import GradientNormMonitor
from thunder_memsave.callbacks.hooks import TrainingHooks
from thunder_memsave.callbacks.learning_rate import LearningRateMonitor
from thunder_memsave.callbacks.memory import MemoryMonitor
from thunder_memsave.callbacks.metrics_csv import MetricsCSV
from thunder_memsave.callbacks.metrics_logger import MetricsLogger
from thunder_memsave.callbacks.progress import ProgressBar
from thunder_memsave.callbacks.state import CallbackStates
from thunder_memsave.callbacks.throughput import ThroughputMonitor

if TYPE_CHECKING:
    from thunder_memsave.callbacks.loss_curve import LossCurve

__all__ = [
    "CallbackStates",
    "EarlyStopping",
    "Fp8Monitor",
    "GradientNormMonitor",
    "LearningRateMonitor",
    "LossCurve",
    "MemoryMonitor",
    "MetricsCSV",
    "MetricsLogger",
    "ModelCheckpoint",
    "ProgressBar",
    "ThroughputMonitor",
    "TrainingControl",
    "TrainingHooks",
]


def __getattr__(name: str) -> object:
    if name == "LossCurve":  # its matplotlib comes with the extra `hf` only
        from thunder_memsave.callbacks.loss_curve import LossCurve

        return LossCurve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
