"""Work-arounds for upstream defects, one file each; `apply()` installs those that the installed versions need."""

from thunder_memsave.compat import torch213_named_tensors


def apply() -> None:
    """Install every work-around whose version guard matches; call before importing thunder."""
    torch213_named_tensors.apply()
