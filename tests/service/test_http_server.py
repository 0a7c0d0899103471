"""What a client may do to a connection: heads without end, silence, bodies that trickle, answers that nobody reads."""

import asyncio
import contextlib
import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway.api.app
import gateway.api.http_server as http_server
import gateway.api.request_body
from gateway.grammar_checker import create_checker
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from outrider.wire.transport.rpc import max_connections
from tests.checkers import ENDLESS, children, until_busy, until_ended
from tests.service.front_door import served, served_by
from tests.service.scripted_generator import ScriptedGenerator, config

SOON_S = 10.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """All timeouts, in seconds."""
    for module, name in (
        (http_server, "HEAD_TIMEOUT_S"),
        (gateway.api.request_body, "BODY_TIMEOUT_S"),
        (gateway.api.app, "WRITE_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, 0.3)
    return 0.3


async def talk(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send the pieces and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        return await asyncio.wait_for(reader.read(), SOON_S)
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


def status_of(answer: bytes) -> tuple[int, Any]:
    """(status, error) of a raw answer with a body in OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


async def serves(port: int) -> bool:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
    return answer.status_code == 200


POST = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"


UNFINISHED = [
    (b"", None),
    (b"POST /v1/comp", 408),
    (POST, 408),
    (b"\r\n", 408),
    (b"GET / HTTP/1.1\r\n\x00\x01: \x02\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (POST + b"content-length: 20\r\n\r\n{", 408),
    (POST + b"content-length: x\r\n\r\n", 400),
    (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
]


async def test_what_does_not_come_to_an_end_is_left(generator: ScriptedGenerator, short: float) -> None:
    async with served(generator) as (port, door):
        started_s = time.monotonic()
        answers = await asyncio.gather(*(talk(port, data) for data, _ in UNFINISHED))
        assert time.monotonic() - started_s < 10 * short
        for answer, (data, status) in zip(answers, UNFINISHED, strict=True):
            assert (status_of(answer)[0] if answer else None) == status, data
        assert await serves(port)
        assert door.bodies.num_bytes == 0
    assert generator.num_open == 0


async def test_a_head_that_trickles_is_left(generator: ScriptedGenerator, short: float) -> None:
    async with served(generator) as (port, _):
        answer = await talk(port, POST, *[b"a: b\r\n"] * 100, pause_s=0.05)
        assert not answer or status_of(answer)[0] == 408
        assert await serves(port)


@pytest.mark.parametrize(
    ("piece", "count"),
    [(b"a: " + b"b" * 5000, 400), (b"a: b\r\n", 1000), (b"x" * 1000, 2000)],
    ids=["one header without end", "many headers", "one header name without end"],
)
async def test_heads_over_the_size_are_431(generator: ScriptedGenerator, piece: bytes, count: int) -> None:
    async with served(generator) as (port, _):
        answer = await talk(port, POST, *[piece] * count)
        assert not answer or status_of(answer)[0] == 431
        assert await serves(port)


async def test_trailers_and_chunk_extensions_without_end_are_left(generator: ScriptedGenerator) -> None:
    async with served(generator) as (port, _):
        for start, rest in ((b"0\r\n", b"a: b\r\n"), (b"1;", b"x" * 1000), (b"0\r\na: ", b"b" * 1000)):
            await talk(port, POST + b"transfer-encoding: chunked\r\n\r\n" + start, *[rest] * 2_000)
            assert await serves(port)


async def test_a_request_right_after_another_and_one_after_a_pause_are_served(
    generator: ScriptedGenerator, short: float
) -> None:
    body = b'{"prompt": "x"}'
    one = POST + b"content-length: 15\r\n\r\n" + body
    last = POST + b"connection: close\r\ncontent-length: 15\r\n\r\n" + body
    async with served(generator) as (port, _):
        answer = await talk(port, one + one, one, last, pause_s=2 * short)
    assert answer.count(b"HTTP/1.1 200 OK") == 4


UPGRADES = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    b"upgrade: x\r\nconnection: keep-alive, upgrade\r\n",
)


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "unknown"])
@pytest.mark.parametrize("pause_s", [0.0, 0.1], ids=["one segment", "a later segment"])
async def test_who_offers_another_protocol_is_answered_once(
    generator: ScriptedGenerator, upgrade: bytes, pause_s: float
) -> None:
    """Its body is no request: behind a proxy, the answer to it would go to somebody else."""
    smuggled = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    body = b'{"prompt": "x"}'
    last = b"GET /readyz HTTP/1.1\r\nconnection: close\r\n\r\n"
    async with served(generator) as (port, _):
        for sent, expected in ((smuggled, [b"400", b"200"]), (body, [b"200", b"200"])):
            head = POST + upgrade + f"content-length: {len(sent)}\r\n\r\n".encode()
            answer = await talk(port, head, sent, last, pause_s=pause_s)
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == expected and b"alive" not in answer
            chunked = POST + upgrade + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n" % len(sent)
            answer = await talk(port, chunked, sent + b"\r\n0\r\n\r\n", last, pause_s=pause_s)
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == expected and b"alive" not in answer
        answer = await talk(port, b"GET /healthz HTTP/1.1\r\n" + upgrade + b"\r\n" + last)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200"]
        assert status_of(await talk(port, b"CONNECT x:1 HTTP/1.1\r\n\r\n" + smuggled))[0] == 400


async def test_requests_behind_one_that_is_slow_are_bounded(generator: ScriptedGenerator) -> None:
    """One read may bring thousands of them."""
    generator.pause_at = 0
    body = b'{"prompt": "x"}'
    slow = POST + b"content-length: 15\r\n\r\n" + body
    async with served(generator) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(slow)
        await asyncio.wait_for(generator.paused.wait(), SOON_S)
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n" * 7 + slow + b"GET /healthz HTTP/1.1\r\n\r\n")
        writer.write(slow * 5000)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), SOON_S) == b""
        writer.close()
        generator.go_on.set()
        await asyncio.wait_for(generator.all_left.wait(), SOON_S)
        assert await serves(port)
    assert len(generator.requests) == 2  # none of those behind it


async def test_more_connections_than_there_may_be_are_503(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (12, 12))  # of the 12 files a server takes 3
    async with served(generator) as (port, _):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(2):
            answer = await talk(port)
            assert status_of(answer)[0] == 503 and b"retry-after: 1" in answer
        (line,) = [record.getMessage() for record in caplog.records if "connections" in record.getMessage()]
        assert line.startswith("3 connections are open") and "(open files: 12)" in line
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        assert await serves(port)


async def test_bodies_at_once_are_bounded_by_their_bytes(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen of the largest: who comes with more is told to come later, before its body is read."""
    size = 100_000
    head = POST + f"content-length: {size}\r\n\r\n".encode()
    async with served(generator, max_body_bytes=size) as (port, door):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        for _, writer in held:
            writer.write(head + b" " * (size - 1))
        while door.bodies.num_bytes < 16 * (size - 1):  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x" * 100})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for reader, writer in held:
            writer.write(b"x")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), SOON_S)
            writer.close()
        assert await serves(port)
        assert door.bodies.num_bytes == 0


async def test_bodies_of_one_key_leave_room_for_the_others(generator: ScriptedGenerator, tmp_path: Path) -> None:
    """Within its limits, as answers are counted when they have been read."""
    slow, quick = (ApiKey(name=name, sha256=digest_of(name), max_concurrent=1) for name in ("slow", "quick"))
    write_keys(tmp_path / "keys.yaml", (slow, quick))
    size = 100_000
    head = POST + f"authorization: Bearer slow\r\ncontent-length: {size}\r\n\r\n".encode()
    async with served(generator, max_body_bytes=size, api_keys=str(tmp_path / "keys.yaml")) as (port, door):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        for _, writer in held:
            writer.write(head + b" " * (size - 1))
        refused = [asyncio.create_task(asyncio.wait_for(reader.readline(), SOON_S)) for reader, _ in held]
        while sum(task.done() for task in refused) < 12:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.01)
        assert all(b" 429 " in task.result() for task in refused if task.done())
        assert door.bodies.num_bytes == door.bodies.num_bytes_of["slow"] == 4 * (size - 1)
        async with httpx.AsyncClient(headers={"authorization": "Bearer quick"}) as http:
            for prompt, status in (("x", 200), ("x" * (size - 100), 400)):  # 400: read, and too long for the context
                answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": prompt})
                assert answer.status_code == status
        for _, writer in held:
            writer.close()
        await asyncio.gather(*refused, return_exceptions=True)
        while door.bodies.num_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not door.bodies.num_bytes_of


async def test_a_client_that_reads_nothing_is_left(generator: ScriptedGenerator, short: float) -> None:
    generator.text = "the quick brown fox jumps over the lazy dog " * 40
    request = json.dumps({"prompt": ["x"] * 20, "n": 8, "max_tokens": 2000, "stream": True}).encode()
    async with served(generator) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(POST + f"content-length: {len(request)}\r\n\r\n".encode() + request)
        await asyncio.wait_for(generator.all_left.wait(), SOON_S)
        assert await serves(port)
        writer.close()
        reader.feed_eof()


async def exchange(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> bytes:
    """Send a request; return the head of its answer, with the body read, too."""
    reader, writer = connection
    writer.write(request)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    await asyncio.wait_for(reader.readexactly(int(length[1])), SOON_S)
    return head


async def test_a_kept_connection_is_idle_for_as_long_as_the_setting_says(generator: ScriptedGenerator) -> None:
    async with served(generator, keep_alive_s=0.3) as (port, _):
        kept = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            assert b"connection: close" not in await exchange(kept, GET_HEALTH)
            await asyncio.sleep(0.1)
        assert await asyncio.wait_for(kept[0].read(), SOON_S) == b""
        kept[1].close()
    assert config().keep_alive_s >= 75


async def test_head_is_answered_as_get_without_the_body(generator: ScriptedGenerator) -> None:
    generator.reason = "no target"
    paths = ("/healthz", "/readyz", "/health", "/ping", "/metrics", "/sd", "/v1/models", "/version", "/")
    async with served(generator) as (port, _):
        statuses = {}
        for path in paths:
            answer = await talk(port, f"HEAD {path} HTTP/1.1\r\nconnection: close\r\n\r\n".encode())
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert not rest, path
            statuses[path] = int(head.split()[1])
        assert statuses == dict.fromkeys(paths, 200) | {"/readyz": 503, "/health": 503, "/ping": 503}


GET_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_server_that_drains_closes_idle_connections_first(generator: ScriptedGenerator) -> None:
    generator.pause_at = 1
    body = b'{"prompt": "x", "stream": true}'
    async with served_by(generator) as (server, port, _):
        idle, streaming, busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await exchange(idle, GET_HEALTH)
        streaming[1].write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        busy[1].write(POST + b"content-length: 15\r\n\r\n" + body[:14])
        await asyncio.wait_for(generator.paused.wait(), SOON_S)
        server.drain()
        assert await asyncio.wait_for(idle[0].read(), SOON_S) == b""
        assert b"\r\nconnection: close\r\n" in await talk(port, GET_HEALTH)
        generator.go_on.set()
        streamed = await asyncio.wait_for(streaming[0].read(), SOON_S)
        assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        busy[1].write(b"}")
        answer = await asyncio.wait_for(busy[0].read(), SOON_S)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close\r\n" in answer
        for _, writer in (idle, streaming, busy):
            writer.close()


STREAMS = {
    "/v1/completions": ({"prompt": "x"}, b": ping\n\n"),
    "/v1/messages": (
        {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
        b'event: ping\ndata: {"type": "ping"}\n\n',
    ),
    "/v1/responses": ({"input": "x"}, b": ping\n\n"),
}


async def test_a_stream_begins_once_its_slot_is_open_and_is_pinged_until_text_comes(
    generator: ScriptedGenerator,
) -> None:
    generator.pause_at = 0
    async with served(generator, stream_ping_s=0.05) as (port, _), httpx.AsyncClient(timeout=SOON_S) as http:
        for path, (fields, ping) in STREAMS.items():
            generator.opens.clear()
            generator.paused.clear()
            generator.go_on.clear()
            body = {"model": generator.model_ids[0], "stream": True, **fields}
            async with asyncio.TaskGroup() as tasks:
                request = http.build_request("POST", f"http://127.0.0.1:{port}{path}", json=body)
                sending = tasks.create_task(http.send(request, stream=True))
                await asyncio.sleep(0.15)
                assert not sending.done(), "in the queue nothing is sent"
                generator.opens.set()
                answer = await sending
            assert answer.status_code == 200
            received = b""
            async for piece in answer.aiter_raw():
                received += piece
                if received.count(ping) >= 3:  # Messages begins with one of its own
                    generator.go_on.set()
            assert b"fox" in received
            assert received.index(ping) < received.index(b"quick")


async def test_a_stream_may_begin_in_the_queue(generator: ScriptedGenerator) -> None:
    generator.opens.clear()
    generator.pause_at = 0
    settings = {"stream_ping_s": 0.05, "stream_in_queue": True}
    body = {"prompt": "x", "stream": True}
    async with (
        served(generator, **settings) as (port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SOON_S) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        assert await anext(answer.aiter_raw()) == b": ping\n\n"


def test_two_servers_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (resource.RLIM_INFINITY, 1 << 20, 4096, 1024, 256)
    taken = []
    for limit in limits:
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        taken.append(max_connections())
    assert taken == [4096, 4096, 1920, 384, 64]


def test_there_are_descriptors_for_the_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        http_server.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_grammar_is_checked_no_longer_than_its_client_stays(generator: ScriptedGenerator) -> None:
    """Of a stream, and a count of tokens. Nobody else waits."""
    named = {"name": "x", "schema": ENDLESS}
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    text = {"format": {"type": "json_schema", **named}}
    before = children()
    async with served(generator) as (port, admission):
        admission.checker = create_checker(60.0)
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/responses/input_tokens", {"input": "hi", "text": text}),
        ):
            data = json.dumps(body).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            kind = "content-type: application/json"
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            busy = await until_busy(before)
            assert await serves(port)
            writer.close()
            await until_ended(busy)
