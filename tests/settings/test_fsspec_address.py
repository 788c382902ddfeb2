"""What is no address of fsspec, or none that can be used, is refused with what to write."""

from __future__ import annotations

import sys

import fsspec
import pytest

from thunder_memsave.settings.fsspec_address import is_address, require_address
from thunder_memsave.settings.problems import ConfigError


@pytest.mark.parametrize(
    "address", ["memory://runs/first", "file:///runs/first@2", "hdfs://host:8020/runs/me@here"]
)
def test_addresses_are_told_from_paths(address: str) -> None:
    assert is_address(address)
    assert not is_address(address.partition("://")[2])
    assert not is_address(False)


def test_an_address_of_a_known_protocol_is_accepted() -> None:
    require_address("memory://runs/first", key="checkpoint.copy_to")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "runs/first",
            "is 'runs/first', which is no address; write one with a protocol, such as s3",
        ),
        ("://runs", "is '://runs', which is no address"),
        ("mem://runs", "but fsspec knows no protocol 'mem'"),
        ("memry://runs", "but fsspec knows no protocol 'memry'; did you mean 'memory'?"),
        (
            "zip://a::s3://b",
            "which is a chain of addresses; name one, such as s3://bucket/runs/first",
        ),
        ("memory://runs/*", "in which *, ?, [ and ] would stand for other names"),
    ],
)
def test_other_texts_are_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_address(address, key="checkpoint.copy_to")
    assert message in str(error.value)
    assert str(error.value).startswith("checkpoint.copy_to is ")
    assert error.value.key == "checkpoint.copy_to"


@pytest.mark.parametrize("secret", ["s3cret", "s3/cret", "s3:cret"])
def test_a_password_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match="has a user and a password") as error:
        require_address(f"ftp://me:{secret}@host/runs", key="resume")
    assert secret not in str(error.value)
    assert "they come from the environment, or from fsspec's own configuration." in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = sys.modules[fsspec.get_filesystem_class.__module__]  # `fsspec.registry` is a mapping
    known = {"class": "no_such_package.Cloud", "err": "Install no_such_package to use clouds"}
    monkeypatch.setitem(registry.known_implementations, "cloud", known)
    with pytest.raises(ConfigError) as error:
        require_address("cloud://runs", key="resume")
    assert str(error.value) == (
        "resume is 'cloud://runs', which needs a package that is not installed (Install no_such_package to use "
        "clouds): pip install no_such_package"
    )
