"""Callbacks for any Lightning Fabric loop that calls Lightning's hook names by `fabric.call`.

The loop passes keyword arguments (see `thunder_memsave.finetune.loop`); each callback names those
it needs. Callbacks that measure add to `metrics` and stand before the ones that write it.
"""

from thunder_memsave.callbacks.checkpoint import ModelCheckpoint
from thunder_memsave.callbacks.learning_rate import LearningRateMonitor
from thunder_memsave.callbacks.metrics_csv import MetricsCSV
from thunder_memsave.callbacks.progress import ProgressBar
from thunder_memsave.callbacks.throughput import ThroughputMonitor

__all__ = [
    "LearningRateMonitor",
    "MetricsCSV",
    "ModelCheckpoint",
    "ProgressBar",
    "ThroughputMonitor",
]
