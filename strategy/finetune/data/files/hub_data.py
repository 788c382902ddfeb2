"""Fetches a data set of the Hugging Face hub with the datasets library, into its cache of Arrow files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from thunder_memsave.compat.foreign_messages import first_line
from thunder_memsave.settings.problems import ConfigError

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_SPLIT = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubData:
    """A split of a data set of the hub."""

    name: str
    subset: str | None = None
    """Which of its configurations; None: its only or default one."""
    split: str = "train"
    revision: str | None = None
    """A branch, tag or commit."""

    def __str__(self) -> str:
        """Return the name for messages."""
        subset = "" if self.subset is None else f"{self.subset}, "
        return f"{self.name} ({subset}{self.split})"

    def files(self) -> list[Path]:
        """Return its Arrow files in the cache of the datasets library, which fetches what is not there.

        Nothing of the data set is executed: the library no longer runs loading scripts.

        Raises:
            ConfigError: the library is missing, or there is no such data set, subset or split here or on the hub.
        """
        self._check()
        try:
            datasets: Any = import_module("datasets")
        except ImportError as error:
            raise ConfigError(
                f"{self.name} on the hub needs the package datasets: pip install datasets."
            ) from error
        if int(datasets.__version__.partition(".")[0]) < 4:
            raise ConfigError(
                f"{self.name} on the hub needs datasets 4 or later, which runs no code of data sets; here is "
                f"{datasets.__version__}: pip install -U datasets."
            )
        try:
            found = datasets.load_dataset(
                self.name,
                self.subset,
                split=self.split,
                revision=self.revision,
                keep_in_memory=False,
            )
        # By type, many of the library's errors and of those below it have nothing in common.
        except Exception as error:
            raise ConfigError(f"cannot load {self} from the hub: {_told(error)}") from error
        return [Path(each["filename"]) for each in found.cache_files]

    def _check(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"hub is {self.name!r}, which is no name on the hub, such as owner/name; a file here is {{path: ...}}."
            )
        if _SPLIT.fullmatch(self.split) is None:
            raise ConfigError(
                f"split is {self.split!r}, but must be the name of one split, such as train; val_fraction holds rows "
                "out, and a weight below 1 takes a part of them."
            )


def _told(error: Exception) -> str:
    told = first_line(error).rstrip(".")
    if constants.is_offline_mode():
        return f"{told}. HF_HUB_OFFLINE is set, so that only what the cache has can be used; fetch it once without."
    if isinstance(error, OSError | ConnectionError):
        return f"{told}. Check the name, and whether this machine reaches the hub; a private one needs `hf auth login`."
    return f"{told}. Name the subset or split that is meant, as {{hub: owner/name, subset: ..., split: ...}}."
