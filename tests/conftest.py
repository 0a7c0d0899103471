"""Fixtures shared by all tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, running

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


STARTS_RAY = ("test_ray", "test_up.py", "test_demo.py")
"""How the names of files begin whose tests start a Ray. Two that start side by side on two cores may take longer than
Ray waits for itself.
"""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests, files stay whole; those that start a Ray follow one another, beside the law,
    which computes all the time.
    """

    def starts_ray(item: pytest.Item) -> bool:
        return item.path.name.startswith(STARTS_RAY)

    items.sort(key=lambda item: 0 if starts_ray(item) else 1 if item.path.parent.name == "law" else 2)  # a stable one
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray(item) else str(item.path)))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo pair served by three real processes, shared by the tests of a session."""
    with running(log_folder=tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture(scope="session")
def dev_prompts() -> list[str]:
    """Held-out text; the first 24 are used for parity."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
