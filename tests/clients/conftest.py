"""Where the system is. Without the client libraries, and without a system, there is nothing to collect here."""

import os

import httpx
import pytest

URL = os.environ.get("OUTRIDER_CLIENTS_URL")
collect_ignore_glob = [] if URL else ["test_*.py"]


@pytest.fixture(scope="session")
def base_url() -> str:
    return f"{URL}/v1"


@pytest.fixture(scope="session")
def model(base_url: str) -> str:
    """The served model's id."""
    return str(httpx.get(f"{base_url}/models").json()["data"][0]["id"])
