"""Says whether a text is an address that fsspec can be given, such as `s3://bucket/runs/first`."""

from __future__ import annotations

import re

from thunder_memsave.settings.problems import ConfigError, suggestion

_USER_AND_PASSWORD = re.compile(r"://[^/@:]*:(?!\d+/)[^@]*@")
_PATTERN = re.compile(r"[*?\[\]]")
_EXAMPLE = "s3://bucket/runs/first"


def is_address(text: object) -> bool:
    """Tell an address from a path on the local disk."""
    return isinstance(text, str) and "://" in text


def require_address(address: str, *, key: str) -> None:
    """Check an address without asking it anything.

    Raises:
        ConfigError: it is none, it holds a password, it is of an unknown protocol, or a package is missing.
    """
    if _USER_AND_PASSWORD.search(address):
        raise ConfigError(
            f"{key} has a user and a password, which would be written into files of the run; leave them out: they come "
            "from the environment, or from fsspec's own configuration.",
            key=key,
        )
    protocol, separator, path = address.partition("://")
    reason = None
    if "::" in address:
        reason = f"which is a chain of addresses; name one, such as {_EXAMPLE}."
    elif not separator or not protocol:
        reason = f"which is no address; write one with a protocol, such as {_EXAMPLE}."
    elif _PATTERN.search(path):
        reason = "in which *, ?, [ and ] would stand for other names; use an address without them."
    reason = reason or _protocol_problem(protocol)
    if reason is not None:
        raise ConfigError(f"{key} is {address!r}, {reason}", key=key)


def _protocol_problem(protocol: str) -> str | None:
    import fsspec  # not needed by runs without addresses

    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        nearest = suggestion(protocol, fsspec.available_protocols())
        return f"but fsspec knows no protocol {protocol!r}{nearest}"
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None)
        install = "" if missing is None else f": pip install {missing.partition('.')[0]}"
        return f"which needs a package that is not installed ({error}){install}"
    return None
