"""What the examples of Lightning download, and what their versions of packages expect, made here from random numbers.

Nothing is read from the network. A stand-in has the interface that an example uses, and few rows, so that a run is
short; which ones an example got is a column of the table.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

NUM_TRAIN, NUM_TEST = 320, 128
_IDX_BYTES = 0x08


def mnist(folder: Path) -> None:
    """Write files of MNIST's format, and let torchvision's own class read them from there."""
    from torchvision import datasets

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, num_rows in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        labels = torch.arange(num_rows) % 10
        noise = torch.rand(num_rows, 28, 28, generator=torch.Generator().manual_seed(num_rows))
        images = (noise * 100 + labels.view(-1, 1, 1) * 15).to(torch.uint8)
        _write_idx(raw / f"{part}-images-idx3-ubyte", images)
        _write_idx(raw / f"{part}-labels-idx1-ubyte", labels.to(torch.uint8))

    class MNIST(datasets.MNIST):  # type: ignore[misc]  # its files lie in a folder of the class's name
        def __init__(self, root: Any, **kwargs: Any) -> None:
            super().__init__(str(folder), **(kwargs | {"download": False}))

    datasets.MNIST = MNIST


def _write_idx(path: Path, values: Tensor) -> None:
    header = struct.pack(f">HBB{values.dim()}I", 0, _IDX_BYTES, values.dim(), *values.shape)
    path.write_bytes(header + values.numpy().tobytes())


def celeba(folder: Path) -> None:
    """Put noise in the place of torchvision's photographs."""
    from PIL import Image
    from torchvision import datasets

    class CelebA(Dataset[Any]):
        def __init__(self, *, transform: Callable[..., Any], **_: Any) -> None:
            self.transform = transform

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            pixels = torch.randint(256, (72, 66, 3), generator=torch.Generator().manual_seed(index))
            return self.transform(Image.fromarray(pixels.to(torch.uint8).numpy())), 0

    datasets.CelebA = CelebA


def wikitext(folder: Path) -> None:
    """Put random tokens in the place of WikiText2: the example keeps 4,000 rows for evaluation."""
    from lightning.pytorch import demos

    class WikiText2(Dataset[Any]):
        vocab_size = 96

        def __len__(self) -> int:
            return 4000 + NUM_TRAIN // 4

        def __getitem__(self, index: int) -> Any:
            tokens = torch.randint(
                self.vocab_size, (13,), generator=torch.Generator().manual_seed(index)
            )
            return tokens[:-1], tokens[1:]

    vars(demos)["WikiText2"] = WikiText2


def omniglot(folder: Path) -> None:
    """Put random tasks in the place of learn2learn's Omniglot; its models and MAML are its own."""
    sys.modules.setdefault("cvxpy", ModuleType("cvxpy"))
    import learn2learn

    class Tasks:
        def __init__(self, ways: int, samples: int) -> None:
            self.generator = torch.Generator().manual_seed(ways * samples)
            self.labels = torch.arange(ways).repeat_interleave(samples)

        def sample(self) -> tuple[Tensor, Tensor]:
            noise = torch.rand(len(self.labels), 1, 28, 28, generator=self.generator)
            return noise + self.labels.view(-1, 1, 1, 1) / 4, self.labels

    class Tasksets:
        def __init__(self, train_ways: int, train_samples: int) -> None:
            self.train = self.validation = self.test = Tasks(train_ways, train_samples)

    def get_tasksets(name: str, *, train_ways: int, train_samples: int, **_: Any) -> Tasksets:
        return Tasksets(train_ways, train_samples)

    learn2learn.vision.benchmarks.get_tasksets = get_tasksets


def older_packages(folder: Path) -> None:
    """Give a script what the installed torch and lightning no longer have: `verbose` of a scheduler, and a type."""
    from lightning.fabric.utilities import types
    from torch.optim import lr_scheduler

    if not hasattr(types, "LRScheduler"):
        types.LRScheduler = lr_scheduler.LRScheduler  # type: ignore[attr-defined]

    init = lr_scheduler.ReduceLROnPlateau.__init__

    def made(self: Any, *args: Any, verbose: bool = False, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    lr_scheduler.ReduceLROnPlateau.__init__ = made  # type: ignore[method-assign]


def without_dropout(folder: Path) -> None:
    """Set the probability of dropout to 0: captured code draws other masks than eager PyTorch from the same seed."""
    for cls in (torch.nn.Dropout, torch.nn.MultiheadAttention):
        _with_zero(cls)


def _with_zero(cls: type) -> None:
    init = cls.__init__  # type: ignore[misc]

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        name = "p" if hasattr(self, "p") else "dropout"
        setattr(self, name, 0.0)

    cls.__init__ = made  # type: ignore[misc]


def is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
