"""A disk error is recognised by its type, by its cause, and by its text."""

from __future__ import annotations

import errno

import pytest

from thunder_memsave.checkpoints.disk_errors import disk_error, is_disk_full, told


def after(first: BaseException, then: BaseException) -> BaseException:
    """Fail twice, as torch's writer does while it closes."""
    try:
        try:
            raise first
        finally:
            raise then
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, "Input/output error", "/a"), errno.EIO),
        (PermissionError(errno.EACCES, "Permission denied"), errno.EACCES),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/a"), errno.ENAMETOOLONG),
        (after(OSError(errno.EROFS, "Read-only"), RuntimeError("unexpected pos")), errno.EROFS),
        (RuntimeError("rank 1 failed: OSError: [Errno 28] No space left on device"), errno.ENOSPC),
        (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),
        (RuntimeError("[Errno 104] Connection reset by peer"), None),
        (ValueError("28"), None),
    ],
)
def test_errors_of_disks_are_known(error: BaseException, number: int | None) -> None:
    found = disk_error(error)
    assert (None if found is None else found.errno) == number
    assert is_disk_full(error) == (number == errno.ENOSPC)


def test_the_reason_and_the_files_are_told() -> None:
    assert told(OSError(errno.EIO, "Input/output error", "/a")) == "Input/output error: /a"
    assert told(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    moved = OSError(errno.EACCES, "Permission denied", "/a", None, "/b")
    assert told(moved) == "Permission denied: /a -> /b"
