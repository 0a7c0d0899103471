"""What a draft that was let in can do to a gateway by what it says of itself, and what users are told of models."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import generate_latest

from gateway.admission.admission import Admission
from gateway.api.app import create_app
from gateway.coordinator import Coordinator
from gateway.workers import links
from gateway.workers.membership import from_config
from gateway.workers.worker_pools import Pools
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.wire.errors import IncompatiblePair
from outrider.wire.peer_text import MAX_REASONS
from outrider.wire.protocol import PROTOCOL
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import GatewayMetrics
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES
from outrider.wire.transport.serving import ServerThread
from tests.service.scripted_generator import DEMO
from tests.waiting import until

FILES = pb.TokenizerFiles(tokenizer_json=(DEMO / "tokenizer.json").read_bytes())
FOLDER = "/srv/private/models"
FACTS: dict[str, Any] = {"vocab_size": 1024, "tokenizer_fingerprint": "f", "context_limit": 512, "protocol": PROTOCOL}


class ScriptedWorker(target_pb2_grpc.TargetServiceServicer):
    """A target or a draft that says of itself what the test lets it say, on a loop of its own."""

    def __init__(self, role: str, model_id: str) -> None:
        self.role = role
        self.info: Callable[[], pb.WorkerInfo] = lambda: pb.WorkerInfo(model_id=model_id, epoch=7, **FACTS)
        self.files = FILES
        self.failure: Callable[[], str] | None = None
        self.ends_at_once = False
        self.num_streams = self.num_infos = self.num_tokenizers = 0
        self._open = threading.Semaphore()
        self._server = ServerThread()
        self.address = self._server.start(self._add_to, "127.0.0.1", 0, MAX_MESSAGE_BYTES)

    def _add_to(self, server: Any) -> list[str]:
        if self.role == "target":
            target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        else:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)  # the same methods
        return []

    async def Pair(self, request: Any, context: Any) -> None:
        """Of a draft; these need none."""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        self.num_infos += 1
        if self.failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.failure())
        return self.info()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:
        self.num_tokenizers += 1
        return self.files

    async def Control(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.num_streams += 1
        with self._open, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001 if self.ends_at_once else None):
                async for _ in requests:
                    pass

    def stop(self) -> None:
        with self._open:  # its stream has ended by now, or is about to
            self._server.stop(0)


class Played:
    """A target and its drafts, which say of themselves what a test has them say, and a gateway's pools of them."""

    def __init__(self) -> None:
        self._workers = [ScriptedWorker("target", f"{FOLDER}/big/target")]
        self._pools: list[Pools] = []

    def draft(self, model_id: str = "draft") -> ScriptedWorker:
        self._workers.append(ScriptedWorker("draft", model_id))
        return self._workers[-1]

    def pools(self, drafts: str) -> Pools:
        """drafts: addresses, as a gateway is given them."""
        config = GatewayConfig(target=self._workers[0].address, draft=drafts)
        self._pools.append(Pools(config, GatewayMetrics()))
        self._pools[-1].update(from_config(config))
        return self._pools[-1]

    async def close(self) -> None:
        for pools in self._pools:
            await pools.close()
        for worker in self._workers:
            worker.stop()


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    made = Played()
    yield made
    await made.close()


async def test_a_draft_that_comes_back_under_other_names_leaves_no_series(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RECONNECT_S", 0.001)
    monkeypatch.setattr(links, "MAX_PAUSE_S", 0.002)
    draft = played.draft("")
    draft.ends_at_once = True
    draft.info = lambda: pb.WorkerInfo(
        model_id=f"\n{draft.num_streams} {'x' * 2000}", epoch=1 + draft.num_streams, **FACTS
    )
    pools = played.pools(draft.address)
    await until(lambda: draft.num_streams > 2)
    early = len(generate_latest(pools.metrics.registry))
    await until(lambda: draft.num_streams > 40)
    (model,) = pools.models.values()
    for number in range(20):  # what was counted goes, too, but for the last few
        pair = model.series.pair(f"counted {number}")
        pair.emitted_tokens.labels(kind="plain").inc()
    model.note_change()
    text = generate_latest(pools.metrics.registry).decode()
    names = {line.partition('draft="')[2].partition('"')[0] for line in text.splitlines() if 'draft="' in line}
    assert len(names) <= 2 + 8, names
    assert max(len(name.replace("\\\\", "\\").encode()) for name in names) == 256  # a line in the format is escaped
    assert len(text) < 12 * early
    assert "vllm:generation_tokens_total" in text
    (total,) = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert float(total.split()[-1]) == 20, "a sum over drafts never falls"


async def _longest_pause_s(until_done: Callable[[], object]) -> float:
    """The longest that this loop worked on anything else than this, in seconds of its thread's CPU time."""
    longest_s, give_up_s = 0.0, time.monotonic() + 30
    before_s = time.thread_time()
    while not until_done() and time.monotonic() < give_up_s:
        await asyncio.sleep(0.002)
        now_s = time.thread_time()
        longest_s = max(longest_s, now_s - before_s)
        before_s = now_s
    return longest_s


async def test_a_drafts_tokenizer_does_not_stop_the_loop(played: Played) -> None:
    entries = ",".join(f'"token number {i}":{i}' for i in range(300_000))
    draft = played.draft()
    draft.files = pb.TokenizerFiles(tokenizer_json=b'{"model":{"vocab":{' + entries.encode() + b"}}}")
    facts = {**FACTS, "tokenizer_fingerprint": "another"}
    draft.info = lambda: pb.WorkerInfo(model_id="draft", epoch=1 + draft.num_infos, **facts)
    pools = played.pools(draft.address)
    link = pools.members["draft-0"].link
    longest_s = await _longest_pause_s(pools.refusals)
    (refusal,) = pools.refusals()
    assert "draft draft does not fit target target: id 0 is " in refusal
    assert "and 'token number 0' in the draft" in refusal
    assert longest_s < 0.05
    draft.files = pb.TokenizerFiles(tokenizer_json=bytes(33 << 20))
    link.retry_now()
    await until(lambda: link.refused is not None and "the draft's is not read: RESOURCE_EXHAUSTED" in str(link.refused))


async def test_a_tokenizer_without_end_is_refused_once(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "RECONNECT_S", 0.02)
    draft = played.draft()
    draft.files = pb.TokenizerFiles(tokenizer_json=b"[" * 100_000)
    facts = {**FACTS, "tokenizer_fingerprint": "another"}
    draft.info = lambda: pb.WorkerInfo(model_id="draft", epoch=1 + draft.num_infos, **facts)
    pools = played.pools(draft.address)
    began_s = time.monotonic()
    await until(lambda: draft.num_tokenizers > 2)
    took_s = time.monotonic() - began_s
    assert took_s > 0.02 + 0.04, "each pause is longer than the one before, whatever its epoch"
    (refusal,) = pools.refusals()
    assert "tokenizer.json (100000 bytes) is not a tokenizers file: RecursionError" in refusal
    assert len([message for message in caplog.messages if "is not used" in message]) == 1
    assert not any(record.exc_info for record in caplog.records)


async def test_reasons_of_a_worker_that_is_away_are_bounded(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "RECONNECT_S", 0.001)
    caplog.set_level("INFO")
    numbers = itertools.count()
    draft = played.draft()
    draft.failure = lambda: f"{next(numbers)} {'why ' * 800}"
    pools = played.pools(draft.address)
    await until(lambda: draft.num_infos > 50)
    told = [record.getMessage() for record in caplog.records if "no answer from the draft" in record.getMessage()]
    assert 1 < len(told) <= MAX_REASONS and max(map(len, told)) < 1400
    draft.failure = None
    await until(lambda: pools.members["draft-0"].connection)
    (connected,) = [each for each in caplog.messages if "connected to the draft" in each]
    assert int(connected.split(" after ")[1].split()[0]) >= 50, "they are counted"


async def test_a_worker_that_describes_itself_at_length_or_turns_into_another_is_not_used(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RECONNECT_S", 0.01)
    monkeypatch.setattr(links, "POLL_S", 0.01)
    draft = played.draft()
    pools = played.pools(draft.address)
    link = pools.members["draft-0"].link
    await until(lambda: link.connection)
    first = link.connection
    assert first is not None
    draft.info = lambda: pb.WorkerInfo(model_id="other", epoch=7, **FACTS)
    await until(lambda: not first.is_alive)
    await until(lambda: link.connection)
    draft.info = lambda: pb.WorkerInfo(model_id="other", epoch=7, eos_token_ids=range(70_000), **FACTS)
    await until(lambda: isinstance(link.refused, IncompatiblePair))
    assert link.refused is not None and "the draft describes itself in " in link.refused.message


# --- names of models ---------------------------------------------------------------------------------------------


async def test_users_are_shown_no_path_of_the_servers_disk(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    drafts = [played.draft(f"{FOLDER}/{name}") for name in ("a/draft", "b/draft", "c/misfit")]
    drafts[2].info = lambda: pb.WorkerInfo(model_id=f"{FOLDER}/c/misfit", epoch=7, **{**FACTS, "vocab_size": 7})
    pools = played.pools(";".join(f"{name}={draft.address}" for name, draft in zip("abc", drafts, strict=True)))
    await until(lambda: pools.refusals() and sum(each.connection is not None for each in pools.members.values()) == 3)
    app = create_app(Admission(Coordinator(pools), pools.config, pools.metrics.registry))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        found = {path: await http.get(path) for path in ("/v1/models", "/v1/models/target", "/readyz", "/metrics")}
    for path, response in found.items():
        assert response.status_code == 200, path
        assert "/srv" not in response.text and "private" not in response.text, path
    model = found["/v1/models/target"].json()
    assert (model["id"], model["draft"]) == ("target", "draft@a")
    (served,) = pools.models.values()
    assert served.series.label_of(None) in ("draft@a", "draft@b"), "rounds without a draft count as the last one's"
    assert "draft misfit does not fit target target" in found["/readyz"].text
    for name in ("draft@a", "draft@b"):
        assert f'spec_rounds_total{{draft="{name}",target="target"}}' in found["/metrics"].text, "they are told apart"
    assert f"{FOLDER}/big/target" in caplog.text and f"{FOLDER}/c/misfit" in caplog.text
