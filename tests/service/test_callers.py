"""Who may call a gateway: web pages of other origins, names that lead here by DNS, and bodies that are no JSON."""

import functools
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.admission.admission import Admission
from gateway.api.app import create_app
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from outrider.wire.settings.config import GatewayConfig
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer

TOKENIZER = demo_tokenizer()
GENERATOR = ScriptedGenerator(TOKENIZER)
KEY = "or-mine"
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
COMPLETIONS = "/v1/completions"
EVERYWHERE = "0.0.0.0"
PAGE = "https://app.example"
SCRAPE, PROBE, INGRESS = "gateway:8000", "10.1.2.3:8000", "llm.example"


def app_of(generator: ScriptedGenerator, **settings: object) -> Any:
    config = GatewayConfig(target="127.0.0.1:1", **settings)  # type: ignore[arg-type]
    return create_app(Admission(generator, config, CollectorRegistry()))


app_of_settings = functools.cache(functools.partial(app_of, GENERATOR))


def gateway_of(app: Any = None, /, **settings: object) -> httpx.AsyncClient:
    """Call `app`, or one of these settings."""
    app = app or app_of_settings(**settings)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with KEY, which may ask twice a minute."""
    write_keys(tmp_path / "keys.yaml", (ApiKey(name="me", sha256=digest_of(KEY), requests_per_minute=2),))
    return str(tmp_path / "keys.yaml")


@pytest.mark.parametrize(
    ("settings", "host", "origin", "refused"),
    [
        # On loopback: by its names, whatever the port, and by no other.
        ({}, "localhost", None, None),
        ({}, "LOCALHOST:9", None, None),
        ({}, "app.localhost:8000", None, None),
        ({}, "127.0.0.1:8000", None, None),
        ({}, "[::1]:8000", None, None),
        ({"host": "::1"}, "[::1]:8000", "http://[::1]:8000", None),
        ({}, "", None, None),  # a probe of HTTP/1.0; browsers always send it
        ({}, INGRESS, None, "allowed_hosts"),
        ({}, "localhost.evil.example:8000", None, "allowed_hosts"),
        ({}, "evil.example@localhost", None, "allowed_hosts"),
        ({}, "evil.example:8000", "http://evil.example:8000", "allowed_hosts"),  # DNS that leads here
        ({}, SCRAPE, None, "allowed_hosts"),
        ({"allowed_hosts": "gateway, llm.example"}, SCRAPE, None, None),
        ({"allowed_hosts": "gateway,llm.example"}, "LLM.example:444", None, None),
        ({"allowed_hosts": "llm.example"}, SCRAPE, None, "allowed_hosts"),
        ({"allowed_hosts": "*"}, "any.example", "https://any.example", None),
        # Beyond it: by any name, until names are said; by address always, as probes do.
        ({"host": EVERYWHERE}, PROBE, None, None),
        ({"host": EVERYWHERE}, SCRAPE, None, None),
        ({"host": EVERYWHERE}, INGRESS, None, None),
        ({"host": EVERYWHERE, "allowed_hosts": "gateway,"}, SCRAPE, None, None),
        ({"host": EVERYWHERE, "allowed_hosts": "gateway,"}, PROBE, None, None),
        ({"host": EVERYWHERE, "allowed_hosts": "gateway,"}, "[fd00::7]:8000", None, None),
        ({"host": EVERYWHERE, "allowed_hosts": "gateway,"}, "localhost:8000", None, None),
        ({"host": EVERYWHERE, "allowed_hosts": "gateway,"}, INGRESS, None, "allowed_hosts"),
        # The page at / is of this origin: also behind an ingress, which takes TLS off.
        ({}, "localhost:8000", "http://localhost:8000", None),
        ({"host": EVERYWHERE}, INGRESS, "https://llm.example", None),
        ({"host": EVERYWHERE}, INGRESS, "https://llm.example:444", "allowed_origins"),
        ({"host": EVERYWHERE}, "llm.example:443", "https://llm.example", None),
        # Other pages, wherever the gateway listens.
        ({}, "localhost:8000", PAGE, "allowed_origins"),
        ({}, "localhost:8000", "http://localhost:3000", "allowed_origins"),
        ({}, "localhost:8000", "null", "allowed_origins"),
        ({}, "localhost", "tauri://localhost", "allowed_origins"),
        ({}, "", PAGE, "allowed_origins"),
        ({"host": EVERYWHERE}, SCRAPE, PAGE, "allowed_origins"),
        ({"host": EVERYWHERE, "allowed_hosts": "*"}, SCRAPE, PAGE, "allowed_origins"),
        ({"allowed_origins": "http://localhost:3000, https://APP.example:443"}, "localhost:8000", PAGE, None),
        ({"allowed_origins": "https://app.example"}, "localhost:8000", "http://app.example", "allowed_origins"),
        ({"allowed_origins": "tauri://localhost"}, "localhost:8000", "tauri://localhost", None),
        ({"allowed_origins": "*"}, "localhost:8000", "null", None),
        ({"allowed_origins": "*"}, "evil.example:8000", PAGE, "allowed_hosts"),
    ],
)
async def test_without_keys_pages_of_other_origins_and_names_are_refused(
    settings: dict[str, object], host: str, origin: str | None, refused: str | None
) -> None:
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    del GENERATOR.requests[:]
    async with gateway_of(**settings) as http:
        answers = [await http.get(path, headers=headers) for path in ("/", "/healthz", "/tokenizer_info")]
        answers.append(await http.post(COMPLETIONS, headers=headers, json={"prompt": "x"}))
    assert {answer.status_code for answer in answers} == {200 if refused is None else 403}
    assert len(GENERATOR.requests) == (refused is None)
    if refused is not None:
        message = answers[-1].json()["error"]["message"]
        named = host if refused == "allowed_hosts" else origin
        assert f"not in {refused}" in message or f"nor in {refused}" in message
        assert repr(named) in message and f"--{refused.replace('_', '-')}" in message


async def test_with_keys_neither_origin_nor_host_is_looked_at(keys: str) -> None:
    headers = {"host": "evil.example:8000", "origin": PAGE, "x-api-key": KEY}
    async with gateway_of(api_keys=keys, allowed_hosts="llm.example") as http:
        answer = await http.post(COMPLETIONS, headers=headers, json={"prompt": "x"})
        assert answer.status_code == 200
        assert (await http.post(COMPLETIONS, headers=headers, content=b'{"prompt": "x"}')).status_code == 415
        assert not [name for name in answer.headers if name.startswith("access-control")]
        asked = await http.options(COMPLETIONS, headers={"origin": PAGE, "access-control-request-method": "POST"})
        assert asked.status_code == 401


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ('application/json;charset="UTF-8"', 200),
        ("application/vnd.api+json", 200),
        (None, 415),
        ("", 415),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=application/json", 415),
        ("application/jsonp", 415),
    ],
)
async def test_a_body_that_does_not_say_json_is_415(content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with gateway_of() as http:
        for path, body in BODIES.items():
            content = httpx.Request("POST", "http://x", json=body).content
            answer = await http.post(path, content=content, headers=headers)
            assert answer.status_code == status, (path, answer.text)
            if status == 415:
                assert repr(content_type) in answer.text or "is missing" in answer.text
                assert "Content-Type: application/json" in answer.text


async def test_an_allowed_origin_gets_cors_headers_on_whatever_is_answered(keys: str) -> None:
    settings = {"api_keys": keys, "allowed_origins": f"http://localhost:3000,{PAGE}"}
    async with gateway_of(**settings) as http:
        http.headers["origin"] = PAGE
        answers = [
            await http.get("/healthz"),
            await http.get("/v1/models"),
            await http.get("/none"),
            await http.delete("/v1/completions", headers={"x-api-key": KEY}),
            await http.post(COMPLETIONS, headers={"x-api-key": KEY}, json={"prompt": "x"}),
            await http.post(COMPLETIONS, headers={"x-api-key": KEY}, json={"prompt": "x", "stream": True}),
            await http.post(COMPLETIONS, headers={"x-api-key": KEY}, json={"prompt": "x"}),
        ]
        assert [answer.status_code for answer in answers] == [200, 401, 404, 405, 200, 200, 429]
        assert answers[-2].text.endswith("data: [DONE]\n\n") and "retry-after" in answers[-1].headers
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"
            assert answer.headers["vary"] == "Origin" and "access-control-allow-credentials" not in answer.headers
        http.headers["origin"] = "https://other.example"
        other = await http.get("/v1/models", headers={"x-api-key": KEY})
    assert other.status_code == 200 and other.headers["vary"] == "Origin"
    assert not [name for name in other.headers if name.startswith("access-control")]


@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_preflight_of_an_allowed_origin_is_204_without_a_key(has_keys: bool, keys: str) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        "access-control-request-private-network": "true",
    }
    settings = {"api_keys": keys} if has_keys else {}
    for path in (*BODIES, "/v1/models", "/tokenizer_info", "/"):
        async with gateway_of(allowed_origins=PAGE, **settings) as http:
            answer = await http.options(path, headers={**asked, "origin": PAGE})
            other = await http.options(path, headers={**asked, "origin": "https://other.example"})
        assert (answer.status_code, answer.content) == (204, b"")
        headers = answer.headers
        assert headers["access-control-allow-origin"] == PAGE and headers["vary"] == "Origin"
        assert headers["access-control-allow-methods"] == "POST"
        assert headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        assert headers["access-control-allow-private-network"] == "true" and int(headers["access-control-max-age"])
        assert other.status_code in (401, 403, 405)
        assert not [name for name in other.headers if name.startswith("access-control")]
