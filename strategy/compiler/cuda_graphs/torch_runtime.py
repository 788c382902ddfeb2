"""Captures with torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_memsave.compiler.cuda_graphs.runtime import Graph, NotCapturableError, Runtime


class CudaRuntime:
    """CUDA graphs on the current device. They capture on a stream of their own, and replay on the current one."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def new_pool(self) -> Any:
        """Return the identifier of a private pool of torch's allocator."""
        return torch.cuda.graph_pool_handle()

    def capture(
        self, function: Callable[[list[Any]], Any], arguments: list[Any], *, pool: Any
    ) -> tuple[Graph, Any]:
        """Capture; torch registers its default generator, so that each replay draws other numbers.

        The mode is `thread_local`: backward is captured in autograd's thread, while others may use CUDA.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                results = function(arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotCapturableError(str(error).splitlines()[0]) from error
        return graph, results


def runtime_of(device: torch.device) -> Runtime | None:
    """Return the runtime of a device; None for one that has no graphs."""
    return CudaRuntime() if device.type == "cuda" else None
