"""Adds the speed of a step to its metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from thunder_memsave.callbacks.peak_flops import MatmulFormat, peak_tflops


class ThroughputMonitor:
    """Metrics of a step's speed, from the metrics `num_tokens` and `num_input_tokens`.

    - `step_seconds`: seconds from the step's start to its end, without an evaluation in it. On CUDA a step ends when
      the host has read its loss, so that its optimizer's kernels count as the next step's;
    - `tokens_per_s`, `tokens_per_s_per_device`: target tokens, so without padding and prompts;
    - `input_tokens_per_s`: all tokens that the model was given;
    - `mfu`: model FLOPs utilisation, the FLOPs that the model needs for all its input (without
      recomputation) over the devices' peak in that time. Only if both are known;
    - `total_tokens`: target tokens since the beginning of the run, across resumes.

    A step whose `loss` the host has not read, because it runs ahead of the device, has the last one alone; the next one
    that was read has the mean of all since then.

    Args:
        flops_per_token: FLOPs of training per input token, as `callbacks.flops.training_flops` counts them.
        matmul_format: Format of most matrix products; "float32" is TF32 if torch allows it.
        peak_tflops: Peak of one device in TFLOPS; None looks it up by the device's name.
        clock: Returns seconds.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        matmul_format: MatmulFormat = "bfloat16",
        peak_tflops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops is {peak_tflops}, but must be positive.")
        self.flops_per_token = flops_per_token
        self.matmul_format: MatmulFormat = matmul_format
        self.peak_tflops = peak_tflops
        self.total_tokens = 0.0
        self._clock = clock
        self._start: float | None = None
        self._pause: float | None = None
        self._sums = _Sums()
        self._peak: float | None = None
        self._num_devices = 1
        self._device = torch.device("cpu")

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that this callback adds, known from `on_train_start` on."""
        names = ("tokens_per_s", "tokens_per_s_per_device", "input_tokens_per_s", "step_seconds")
        return (*names, "total_tokens", *(("mfu",) if self._gives_mfu else ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the tokens so far."""
        return {"total_tokens": self.total_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting from there."""
        self.total_tokens = state_dict["total_tokens"]

    def peak_of(self, device: torch.device) -> float | None:
        """Return the peak of one device in TFLOPS, if it is known."""
        if self.peak_tflops is not None or device.type != "cuda":
            return self.peak_tflops
        matmul_format = self.matmul_format
        if matmul_format == "float32" and torch.get_float32_matmul_precision() != "highest":
            matmul_format = "tf32"
        return peak_tflops(torch.cuda.get_device_name(device), matmul_format)

    def on_train_start(self, *, fabric: Fabric) -> None:
        """Read the number and the peak of the devices."""
        self._num_devices = fabric.world_size
        self._device = fabric.device
        self._peak = self.peak_of(fabric.device)

    def on_train_batch_start(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def on_validation_start(self) -> None:
        """Stop the clock."""
        self._pause = self._clock()

    def on_validation_end(self) -> None:
        """Resume the clock."""
        if self._start is not None and self._pause is not None:
            self._start += self._clock() - self._pause
        self._pause = None

    def on_train_batch_end(self, *, metrics: dict[str, Any]) -> None:
        """Add the metrics of the step."""
        if self._start is None:
            return
        if self._device.type == "cuda" and "loss" not in metrics:
            # Nobody may have waited for its kernels, which belong to the step.
            torch.cuda.synchronize(self._device)
        if "num_tokens" in metrics:
            self.total_tokens += metrics["num_tokens"]
            metrics["total_tokens"] = self.total_tokens
        self._sums.add(self._clock() - self._start, metrics)
        if not isinstance(metrics.get("loss"), Tensor):
            self._add_speed(metrics)
            self._sums = _Sums()

    def _add_speed(self, metrics: dict[str, Any]) -> None:
        sums = self._sums
        metrics["step_seconds"] = sums.seconds / sums.num_steps
        if "num_tokens" in metrics:
            metrics["tokens_per_s"] = sums.tokens / sums.seconds
            metrics["tokens_per_s_per_device"] = metrics["tokens_per_s"] / self._num_devices
        if "num_input_tokens" in metrics:
            speed = metrics["input_tokens_per_s"] = sums.input_tokens / sums.seconds
            if self.flops_per_token is not None and self._peak is not None:
                tflops = speed * self.flops_per_token / self._num_devices / 1e12
                metrics["mfu"] = tflops / self._peak

    @property
    def _gives_mfu(self) -> bool:
        return self.flops_per_token is not None and self._peak is not None


@dataclass(slots=True)
class _Sums:
    """Sums over the steps since the host has last read one."""

    num_steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    input_tokens: float = 0.0

    def add(self, seconds: float, metrics: Mapping[str, Any]) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.tokens += metrics.get("num_tokens", 0.0)
        self.input_tokens += metrics.get("num_input_tokens", 0.0)
