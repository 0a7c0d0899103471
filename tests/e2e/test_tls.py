"""The whole system with certificates on every connection, used by HTTPS and by the SDK."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.client import Client
from tests.certificates import all_folders
from tests.forked import run
from tests.stack import Stack, running

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_folders(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(folders: Path) -> Iterator[Stack]:
    with running(
        target_args=("--tls-dir", str(folders / "target")),
        draft_args=("--tls-dir", str(folders / "draft")),
        gateway_args=("--tls-dir", str(folders / "gateway"), "--public-tls-dir", str(folders / "public")),
    ) as started:
        yield started


def complete(stack: Stack, folders: Path) -> dict[str, object]:
    context = ssl.create_default_context(cafile=str(folders / "ca.pem"))
    with httpx.Client(verify=context, timeout=60) as client:
        body = {"model": "", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        url = stack.http.replace("http://", "https://")
        body["model"] = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        answer = client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found


def test_answers_are_those_of_a_system_without(secure: Stack, folders: Path, stack: Stack) -> None:
    """By both front doors; and drafts are verified, so the draft reaches the target."""
    found = complete(secure, folders)
    with Client(stack.grpc) as client:
        expected = client.generate(PROMPT, max_tokens=24, temperature=0.0).text
    assert found["choices"][0]["text"] == expected  # type: ignore[index]
    with Client(secure.grpc, tls_ca=folders / "ca.pem") as client:
        completion = client.generate(PROMPT, max_tokens=24, temperature=0.0)
        assert completion.text == expected
        assert completion.usage.num_accepted_tokens > 0
        sampled = client.generate(PROMPT, max_tokens=24, temperature=1.0, seed=3)
        assert sampled.usage.num_draft_tokens > 0


def test_a_folder_that_cannot_be_used_ends_the_start(folders: Path, tmp_path: Path) -> None:
    """Before the model is loaded, in one line."""
    ended = run("draft_service", "--model", "absent", "--tls-dir", str(folders / "target"))
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith(f"draft: tls_dir: {folders / 'target' / 'cert.pem'} is not")
