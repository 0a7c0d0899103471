"""Heads that drafts register: whose maps are wanted, which are refused and why, and when one is let go."""

import asyncio
import contextlib
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.engine.heads.projection import Projection, ProjectionSpec, digest_of
from outrider.engine.memory import SpareMemory
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.settings.config import TargetConfig
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.features import own_heads
from target_service.features import registered_heads as module
from target_service.features.features import FeatureJob
from target_service.features.registered_heads import Heads

HIDDEN, LAYERS = 8, 2
WANTED, READY, REFUSED = tpb.HEAD_STATE_NEEDS_WEIGHTS, tpb.HEAD_STATE_READY, tpb.HEAD_STATE_REFUSED


def map_of(seed: int = 0, hidden: int = HIDDEN, taps: tuple[int, ...] = (0, 1)) -> bytes:
    spec = ProjectionSpec(taps, 4)
    weights = torch.randn(spec.shapes(hidden)["fc"], generator=torch.Generator().manual_seed(seed))
    return Projection(spec, {"fc": weights}).to_bytes()


class Stream:
    """A draft's stream, which keeps the replies."""

    def __init__(self, target: "Target", number: int) -> None:
        self.target, self.number = target, number

    def reply(self, digest: bytes, state: Any, why: str = "") -> None:
        self.target.replies.setdefault(self.number, []).append((state, why))
        self.target.changed.set()


class Target:
    """The registry and what it asks of the engine."""

    def __init__(self, refusal: str | None = None, spare: SpareMemory | None = None) -> None:
        self.jobs: list[Any] = []
        self.refusal: str | None = None
        """Why the engine cannot run a projection; None where it can."""
        self.metrics = WorkerMetrics("target")
        self.heads = Heads(self, self.metrics, HIDDEN, LAYERS, refusal, spare or SpareMemory(1 << 20))  # type: ignore[arg-type]
        self.streams: dict[int, Stream] = {}
        self.replies: dict[int, list[tuple[Any, str]]] = {}
        self.changed = asyncio.Event()

    def submit(self, job: FeatureJob) -> None:
        job.run(self)  # type: ignore[arg-type]
        self.changed.set()

    call = EngineThread.call

    # as `Features`

    def add_head(self, digest: bytes, projection: Projection) -> None:
        self.jobs.append(SimpleNamespace(digest=digest, projection=projection))
        if self.refusal is not None:
            raise InvalidRequest(self.refusal)

    def drop_head(self, digest: bytes) -> None:
        self.jobs.append(digest)

    def stream(self, number: int) -> Stream:
        return self.streams.setdefault(number, Stream(self, number))

    def gone(self, number: int) -> None:
        self.heads.remove_stream(self.stream(number))

    def is_ready(self, number: int, digest: bytes) -> bool:
        return self.heads.is_ready(self.stream(number), digest)

    def register(self, stream: int, data: bytes, **fields: Any) -> Any:
        spec = tpb.HeadSpec(**{"digest": digest_of(data), "num_bytes": len(data), **fields})
        try:
            self.heads.register(self.stream(stream), spec)
        except InvalidRequest as error:
            self.stream(stream).reply(spec.digest, REFUSED, error.message)
        return self.replies.get(stream, [(None, "")])[-1][0]

    def send(self, stream: int, data: bytes, digest: bytes | None = None) -> None:
        """Register a head and send the whole of its map."""
        self.register(stream, data, digest=digest or digest_of(data))
        self.piece(stream, data, 0, len(data), digest)

    def piece(self, stream: int, data: bytes, start: int, end: int, digest: bytes | None = None) -> None:
        digest = digest_of(data) if digest is None else digest
        message = tpb.HeadWeights(digest=digest, offset=start, data=data[start:end])
        self.heads.add_piece(self.stream(stream), message)

    async def until(self, check: Any) -> None:
        async with asyncio.timeout(5):
            while not check():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):  # not all that changes is told
                    await asyncio.wait_for(self.changed.wait(), 0.05)

    async def registered(self, stream: int, data: bytes) -> None:
        """Register a head whose map is not here, in two pieces."""
        assert self.register(stream, data) is WANTED
        self.piece(stream, data, 0, 20)
        self.piece(stream, data, 20, len(data))
        await self.until(lambda: self.replies[stream][-1][0] != WANTED)

    @property
    def num_bytes(self) -> float:
        value = self.metrics.registry.get_sample_value("outrider_worker_head_bytes", {"worker": "target"})
        return float(value or 0)

    async def refused(self, stream: int = 1) -> str:
        """Return why, once nothing of it is left."""
        await self.until(lambda: self.replies.get(stream, [(None, "")])[-1][0] == REFUSED)
        assert not self.heads._uploads and not self.is_ready(stream, b"")
        return self.replies[stream][-1][1]


async def test_one_copy_serves_all_drafts_that_registered_it_and_goes_with_the_last() -> None:
    target, data = Target(), map_of()
    await target.registered(1, data)
    assert target.replies[1][-1] == (READY, "") and target.num_bytes == 4 * 2 * HIDDEN * 4
    assert target.register(2, data) is READY, "it is here already"
    assert target.register(1, data) is READY, "asked for twice"
    assert len(target.jobs) == 1
    torch.testing.assert_close(target.jobs[0].projection.tensors, Projection.from_bytes(data, HIDDEN, LAYERS).tensors)
    target.gone(1)
    assert not target.is_ready(1, digest_of(data)) and target.is_ready(2, digest_of(data))
    assert len(target.jobs) == 1
    target.gone(2)
    assert target.jobs[1:] == [digest_of(data)] and target.num_bytes == 0
    assert target.register(3, data) is WANTED


async def test_two_that_send_the_same_at_once_end_with_one_copy() -> None:
    target, data = Target(), map_of()
    assert target.register(1, data) is target.register(2, data) is WANTED
    for stream in (1, 2):
        target.piece(stream, data, 0, len(data))
    await target.until(lambda: not target.heads._uploads)
    await target.until(lambda: target.is_ready(1, digest_of(data)) and target.is_ready(2, digest_of(data)))
    assert len(target.jobs) == 1
    assert target.replies[1][-1] == target.replies[2][-1] == (READY, "")
    target.gone(1)
    target.gone(2)
    assert target.jobs[1:] == [digest_of(data)]


@pytest.mark.parametrize(("num_bytes", "why"), [(0, "num_bytes 0, must have at least 1"), (2**64 - 1, "at most 16 of")])
async def test_a_head_of_no_bytes_or_more_than_may_be_held_is_refused_before_it_is_sent(
    num_bytes: int, why: str
) -> None:
    target = Target()
    assert target.register(1, map_of(), num_bytes=num_bytes) is REFUSED
    assert why in await target.refused()


async def test_a_target_without_features_refuses_every_head() -> None:
    target = Target("it has no taps")
    assert target.register(1, map_of()) is REFUSED
    assert await target.refused() == "the target gives no features: it has no taps"
    with pytest.raises(InvalidRequest, match="the target gives no features: it has no taps"):
        target.heads.check_probe(4, [0])


async def test_a_stream_has_one_head() -> None:
    target = Target()
    await target.registered(1, map_of())
    assert target.register(1, map_of(seed=1)) is REFUSED
    assert "another head" in await target.refused()
    assert target.is_ready(1, digest_of(map_of())), "the first is as it was"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([(0, 20), (0, 20)], "from byte 0 came, must be 1 to .* from byte 20"),
        ([(20, 40)], "from byte 20 came, must be 1 to .* from byte 0"),
        ([(0, 20), (20, 20)], "0 bytes from byte 20 came"),
    ],
    ids=["twice", "out of order", "empty"],
)
async def test_weights_that_break_a_rule(pieces: list[tuple[int, int]], why: str) -> None:
    target, data = Target(), map_of()
    target.register(1, data)
    for piece in pieces:
        target.piece(1, data, *piece)
    assert re.search(why, await target.refused())
    target.piece(1, data, 0, 20)
    assert "not asked for" in target.replies[1][-1][1]
    await target.registered(1, data)
    assert target.replies[1][-1] == (READY, ""), "it may be tried again"


async def test_too_many_weights_and_too_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target, data = Target(), map_of()
    target.register(1, data, num_bytes=30)
    target.piece(1, data, 0, 20)
    target.piece(1, data, 20, 40)
    assert "20 bytes from byte 20 came, must be 1 to 10" in await target.refused()
    monkeypatch.setattr(module, "MAX_PIECE_BYTES", 16)
    target.register(2, data)
    target.piece(2, data, 0, 17)
    assert "17 bytes from byte 0 came, must be 1 to 16" in await target.refused(2)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (map_of(hidden=HIDDEN + 1), "is it another target's head?"),
        (map_of(taps=(0, LAYERS + 1)), f"reads the taps [0, {LAYERS + 1}]"),
        (map_of().replace(b"F32", b"I32"), "must be one of"),
        (b"x" * 64, "cannot be read"),
        (map_of()[:-4] + b"\x00\x00\xc0\x7f", "not finite"),
    ],
    ids=["another width", "no such tap", "another dtype", "rubbish", "NaN"],
)
async def test_maps_that_are_none_of_this_target(data: bytes, why: str) -> None:
    target = Target()
    target.send(1, data)
    assert why in await target.refused()
    assert not target.jobs


async def test_weights_of_another_digest() -> None:
    target, other = Target(), digest_of(map_of(seed=1))
    target.send(1, map_of(), other)
    assert f"not {other.hex()}" in await target.refused()
    assert not target.jobs


async def test_weights_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_S", 0.02)
    target, data = Target(), map_of()
    target.register(1, data)
    assert "no weights came" in await target.refused()
    target.register(2, data)
    target.piece(2, data, 0, 20)
    assert "no weights came" in await target.refused(2)


async def test_heads_are_bounded_in_number_and_memory_those_on_their_way_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_HEADS", 2)
    target = Target()
    await target.registered(1, map_of())
    assert target.register(2, map_of(seed=1)) is WANTED
    assert target.register(3, map_of(seed=2)) is REFUSED and "holds 2 heads" in target.replies[3][-1][1]
    assert target.register(3, map_of()) is READY, "a copy that is here costs nothing"
    target.gone(2)
    assert target.register(4, map_of(seed=2)) is WANTED, "what a stream had on its way goes with it"
    monkeypatch.setattr(module, "MAX_HEADS", 16)
    monkeypatch.setattr(module, "MAX_HEADS_BYTES", 3 * len(map_of()) // 2)
    assert target.register(5, map_of(seed=3)) is REFUSED and "bytes are taken" in target.replies[5][-1][1]


async def test_maps_and_what_is_tapped_for_them_take_no_more_than_is_spare() -> None:
    """Which hidden states a map reads is known once it has come."""
    first, second = map_of(), map_of(seed=1, taps=(1, 2))
    num_bytes = Projection.from_bytes(first, HIDDEN, LAYERS).num_bytes
    tap_bytes = len(first)
    room = 2 * num_bytes + 3 * tap_bytes
    target = Target(spare=SpareMemory(room, tap_bytes))
    for stream, data in ((1, first), (2, second)):
        target.send(stream, data)
        await target.until(lambda: not target.heads._uploads)
    assert target.register(3, map_of(seed=2)) is REFUSED
    why = target.replies[3][-1][1]
    assert f"holds 2 heads of {2 * num_bytes} bytes" in why and f"{room} are free" in why and "kv_cache_tokens" in why
    less = Target(spare=SpareMemory(room - 1, tap_bytes))
    await less.registered(1, first)
    assert less.register(2, second) is WANTED
    less.piece(2, second, 0, len(second))
    assert f"{3 * tap_bytes} of them for 3 hidden states" in await less.refused(2)
    less.gone(1)
    await less.registered(2, second)


async def test_own_heads_use_spare_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, projection = SimpleNamespace(num_parameters=50, dtype="bfloat16"), SimpleNamespace(num_bytes=0)
    monkeypatch.setattr(own_heads, "load_head", lambda *_: SimpleNamespace(facts=facts, projection=projection))
    runner: Any = SimpleNamespace(features_refusal=None, spare=SpareMemory(109, 10))
    config = TargetConfig(model="target", heads="medusa")
    with pytest.raises(ConfigError, match=r"are medusa, which take 110 bytes, and 109 are free .* kv_cache_tokens"):
        own_heads.load_own_heads(config, runner, b"", cast(Any, None))


async def test_a_projection_for_which_the_engine_has_no_memory() -> None:
    target, data = Target(), map_of()
    target.refusal = "out of memory"
    await target.registered(1, data)
    assert await target.refused() == "out of memory" and target.num_bytes == 0
    assert target.register(1, data) is WANTED


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("torch failed")])
@pytest.mark.parametrize("place", ["reading", "engine"])
async def test_a_fault_of_the_target_refuses_the_head_and_leaves_nothing(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    target, data = Target(), map_of()
    with monkeypatch.context() as patch:
        patch.setattr(*((module, "_projection_of") if place == "reading" else (target, "add_head")), fail)
        await target.registered(1, data)
    why = await target.refused()
    assert why == f"the target failed to take the head: {type(error).__name__}: {error}" and target.num_bytes == 0
    await target.registered(1, data)
    assert target.replies[1][-1] == (READY, "")


async def test_a_stream_that_ends_while_its_map_is_read_leaves_nothing() -> None:
    target, data = Target(), map_of()
    target.send(1, data)
    reading = target.heads._uploads[target.stream(1)].reading  # type: ignore[index]
    target.gone(1)
    await asyncio.gather(reading, return_exceptions=True)
    assert not target.jobs and not target.heads._heads and not target.heads._uploads
    await target.registered(2, data)
    target.gone(2)
    assert target.jobs[-1] == digest_of(data)


async def test_a_stream_that_ends_before_the_engine_answers() -> None:
    target, data = Target(), map_of()
    target.register(1, data)
    held = list[FeatureJob]()
    submit, target.submit = target.submit, held.append  # type: ignore[method-assign]
    target.piece(1, data, 0, len(data))
    await target.until(lambda: held)
    target.gone(1)
    for job in held:
        submit(job)
    await asyncio.sleep(0.01)
    assert target.replies[1][-1][0] == WANTED and not target.heads._heads
    assert target.jobs[1:] == [digest_of(data)]


@pytest.mark.parametrize(
    ("num_tokens", "taps", "why"),
    [
        (0, [0], "0 tokens"),
        (129, [0], "129 tokens"),
        (4, [], "0 in all"),
        (4, [0] * 17, "17 taps"),
        (4, [LAYERS + 1], r"taps \[3\]"),
        (4, [-2], r"taps \[-2\]"),
    ],
)
async def test_probes_that_are_not_run(num_tokens: int, taps: list[int], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Target().heads.check_probe(num_tokens, taps)
    Target().heads.check_probe(128, [-1, 0, LAYERS])
