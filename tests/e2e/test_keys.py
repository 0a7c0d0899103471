"""API keys of a real gateway over the session's workers, through HTTP and the SDK."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from outrider.client import Client, RateLimited, Unauthenticated
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, write_keys
from tests.stack import Stack, gateway_beside


def test_only_keys_of_the_file_are_served_and_a_revoked_one_is_refused(stack: Stack, tmp_path: Path) -> None:
    file, mine, yours = tmp_path / "keys.yaml", new_key(), new_key()
    limited = ApiKey(name="me", sha256=digest_of(mine), requests_per_minute=3)
    other = ApiKey(name="you", sha256=digest_of(yours))
    write_keys(file, (limited, other))
    body = {"prompt": "def f():", "max_tokens": 4, "temperature": 0}
    with gateway_beside(stack, "--api-keys", str(file)) as gateway, httpx.Client(timeout=60) as http:
        url, grpc = f"http://{gateway.ready['http']}", str(gateway.ready["grpc"])

        def post(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return http.post(f"{url}/v1/completions", json=body, headers=headers)

        assert http.post(f"{url}/v1/completions", json=body).status_code == 401
        assert post("or-wrong").status_code == 401
        assert post(mine).json()["usage"]["completion_tokens"] == 4
        with Client(grpc, api_key=mine, retries=0) as client:
            assert client.generate("def f():", max_tokens=2).text
            client.generate("def f():", max_tokens=2)
            with pytest.raises(RateLimited) as over:
                client.generate("def f():", max_tokens=2)
        assert over.value.retry_after_s and over.value.retry_after_s <= 20
        with Client(grpc, retries=0) as client, pytest.raises(Unauthenticated):
            client.generate("def f():")
        assert post(yours).status_code == 200
        write_keys(file, (limited,))
        give_up = time.monotonic() + 30
        while post(yours).status_code != 401:
            assert time.monotonic() < give_up, "a revoked key is still served"
            time.sleep(0.1)
        shown = http.get(f"{url}/metrics").text
        assert 'outrider_key_tokens_total{key="me",kind="completion"} 8.0' in shown
        assert mine not in shown and http.get(f"{url}/healthz").status_code == 200
