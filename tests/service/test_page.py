"""The files of the page as they are served: which, as what, under which policy."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from gateway.api.page import page_files
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from outrider.wire.settings.config import GatewayConfig, load
from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer

TOKENIZER = demo_tokenizer()
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {file.name: file.read_bytes() for file in page_files()}


def serving(**settings: object) -> httpx.AsyncClient:
    return in_process(ScriptedGenerator(TOKENIZER), **settings)


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with serving() as client:
        yield client


@pytest.mark.parametrize("name", sorted(FILES))
async def test_each_file_is_served_as_what_it_is_under_a_strict_policy(http: httpx.AsyncClient, name: str) -> None:
    path = "/" if name == "index.html" else f"/page/{name}"
    response = await http.get(path)
    headers = response.headers
    assert response.status_code == 200 and response.content == FILES[name]
    assert headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    for directive in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy.pop(directive) == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'self'"}
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cache-control"] == "no-cache"
    again = await http.get(path, headers={"if-none-match": headers["etag"]})
    assert (again.status_code, again.content) == (304, b"") and "content-security-policy" in again.headers
    head = await http.head(path)
    assert (head.status_code, head.content) == (200, b"") and head.headers["content-length"] == str(len(FILES[name]))


async def test_without_a_page_there_is_none() -> None:
    assert load(GatewayConfig, ["--target", "127.0.0.1:1", "--no-page"]).page is False
    async with serving(page=False) as http:
        assert [(await http.get(path)).status_code for path in ("/", "/page/main.js")] == [404, 404]


async def test_the_page_is_open_where_keys_are_asked_for_and_holds_none(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", (ApiKey(name="me", sha256=digest_of("or-me")),))
    async with serving(api_keys=str(tmp_path / "keys.yaml")) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


def test_the_browser_is_asked_to_store_neither_prompts_nor_keys() -> None:
    """What a form held would else be offered again, and be there after a restart."""
    tags = re.findall(r"<(?:form|textarea|input [^>]*password)\b[^>]*>", FILES["index.html"].decode())
    asked = {re.findall('id="(.+?)"', tag)[0]: re.findall('autocomplete="(.+?)"', tag) for tag in tags}
    kept_out = {name: ["off"] for name in ("form", "key-form", "prompt", "system-prompt")}
    assert asked == kept_out | {"key": ["new-password"]}
