"""A file system of fsspec in memory, `unsteady://`, that fails or is killed at the operation that a test names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from thunder_memsave.checkpoints.manifest import (
    Manifest,
    files_in,
    record_file,
    write_manifest,
)


class KilledError(BaseException):
    """The end of the process; nothing handles it."""


class UnsteadyStore(MemoryFileSystem):  # type: ignore[misc]
    """Counts operations, and raises `error` in place of one, or of all from one on; a write is then half done."""

    protocol = "unsteady"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    done: ClassVar[list[str]] = []
    fails_at: ClassVar[int | None] = None
    fails_after: ClassVar[bool] = False
    error: ClassVar[BaseException] = KilledError()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("unsteady://")))

    def _operate(self, what: str, path: str, half: bytes | None = None) -> None:
        number, at = len(self.done), type(self).fails_at
        self.done.append(f"{what} {self._strip_protocol(path)}")
        if at is not None and (number == at or (number > at and self.fails_after)):
            if half is not None:
                super().pipe_file(path, half[: len(half) // 2])
            raise self.error

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        content = Path(lpath).read_bytes()
        self._operate("put", rpath, content)
        super().pipe_file(rpath, content)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        self._operate("put", path, value)
        super().pipe_file(path, value)

    def rm_file(self, path: str) -> None:
        self._operate("delete", path)
        super().rm_file(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._operate("list", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._operate("read", path)
        with super().open(path, "rb") as file:
            return bytes(file.read())


@contextmanager
def unsteady_store() -> Iterator[type[UnsteadyStore]]:
    """Begin with an empty store under `unsteady://`."""
    fsspec.register_implementation("unsteady", UnsteadyStore, clobber=True)
    steady()
    UnsteadyStore.store.clear()
    try:
        yield UnsteadyStore
    finally:
        steady()
        UnsteadyStore.store.clear()


def steady() -> None:
    """Let nothing fail, and count from 0."""
    UnsteadyStore.done.clear()
    UnsteadyStore.fails_at, UnsteadyStore.fails_after = None, False


def fail(at: int, *, after: bool = False, error: BaseException | None = None) -> None:
    """Let an operation fail, counted from now on, and all after it if wanted."""
    steady()
    UnsteadyStore.fails_at, UnsteadyStore.fails_after = at, after
    UnsteadyStore.error = KilledError() if error is None else error


def write_checkpoint(directory: Path, step: int, *, text: str = "", val_loss: float = 1.0) -> Path:
    """Write what looks like a checkpoint of one rank, without training."""
    path = directory / f"step-{step:08d}"
    (path / "state").mkdir(parents=True)
    for name in ("state/.metadata", "state/meta.pt", "state/__0_0.distcp", "random-00000.pt"):
        (path / name).write_text(f"{name} of step {step} {text}")
    manifest = Manifest(
        step=step,
        world_size=1,
        sharding="none",
        versions={},
        values={"step": step},
        tensors={},
        files={name: record_file(path, name) for name in files_in(path)},
        metrics={"val_loss": val_loss},
    )
    write_manifest(path, manifest)
    return path


def content_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a directory, by their paths in it."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
