"""Fixtures shared by all tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, running

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo pair served by three real processes, shared by the tests of a session."""
    with running(log_folder=tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture(scope="session")
def dev_prompts() -> list[str]:
    """Held-out text; the first 24 are used for parity."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
