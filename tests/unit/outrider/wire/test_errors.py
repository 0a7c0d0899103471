"""The error tree: every class, wherever it is defined, says how it travels."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import grpc
import pytest

import draft_service
import gateway
import outrider
import target_service
from outrider.wire.errors import OutriderError


def import_all(*packages: ModuleType) -> None:
    """So that every subclass exists."""
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def subclasses(of: type[OutriderError]) -> Iterator[type[OutriderError]]:
    yield of
    for child in of.__subclasses__():
        yield from subclasses(child)


import_all(outrider, gateway, draft_service, target_service)
ALL = sorted(set(subclasses(OutriderError)), key=lambda cls: cls.__qualname__)
RETRY_CODES = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__qualname__)
def test_every_class_has_its_codes(cls: type[OutriderError]) -> None:
    assert isinstance(cls.grpc_code, grpc.StatusCode) and cls.grpc_code is not grpc.StatusCode.OK
    assert cls.http_status in range(400, 600)
    assert isinstance(cls.retryable, bool) and isinstance(cls.openai_type, str)
    assert cls.openai_code is None or cls.openai_code == cls.openai_code.lower()
    if cls.retryable:
        assert cls.grpc_code in RETRY_CODES, "clients retry by code: it must not be one of a fault"
    if cls.http_status < 500 and cls.http_status != 429:
        assert not cls.retryable, "the caller's fault does not go away by itself"
        assert cls.openai_type == "invalid_request_error"
