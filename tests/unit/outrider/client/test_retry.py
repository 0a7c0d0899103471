"""When a call is tried again, and for how long."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.client import AsyncClient, RetryPolicy
from outrider.wire import errors
from tests.unit.outrider.client.connected import FakeTransport
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, failing, rounds

FAST = RetryPolicy(retries=2, backoff_s=0.01)


@pytest.mark.parametrize("error", [errors.Unavailable("restarts"), errors.Overloaded("full")])
async def test_retries_before_the_first_message(gateway: ScriptedGateway, error: errors.OutriderError) -> None:
    gateway.scripts.extend([failing(error), failing(error)])
    async with AsyncClient(gateway.address, retries=FAST) as client:
        assert (await client.generate("hello")).text == TEXT
    assert len(gateway.requests) == 3


async def test_retries_are_counted_out(gateway: ScriptedGateway) -> None:
    gateway.scripts.extend([failing(errors.Unavailable(f"failure {i}")) for i in range(9)])
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.Unavailable, match="failure 2"):
            await client.generate("hello")
    assert len(gateway.requests) == 3


@pytest.mark.parametrize("error", [errors.InvalidRequest("no"), errors.WorkerFault("bug"), errors.DeadlineExceeded("")])
async def test_what_cannot_be_helped_is_not_retried(gateway: ScriptedGateway, error: errors.OutriderError) -> None:
    gateway.scripts.append(failing(error))
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.OutriderError):
            await client.generate("hello")
    assert len(gateway.requests) == 1


async def test_no_retry_after_the_first_message(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Unavailable("target lost"), num_rounds=1))
    seen = []
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.Unavailable, match="target lost"):
            async for round_ in client.stream("hello"):
                seen.append(round_.text_delta)
    assert seen == [" the quick red"]
    assert len(gateway.requests) == 1


async def test_retry_after_is_respected(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Overloaded("full", retry_after_s=0.4)))
    async with AsyncClient(gateway.address, retries=FAST) as client:
        started = time.monotonic()
        await client.generate("hello")
        assert time.monotonic() - started >= 0.4
    assert len(gateway.requests) == 2


async def test_a_wait_past_the_deadline_is_not_begun(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Overloaded("full", retry_after_s=20)))
    async with AsyncClient(gateway.address, retries=FAST) as client:
        started = time.monotonic()
        with pytest.raises(errors.Overloaded) as caught:
            await client.generate("hello", timeout_s=5)
        assert time.monotonic() - started < 3
    assert caught.value.retry_after_s == 20
    assert len(gateway.requests) == 1


async def test_models_is_retried(gateway: ScriptedGateway) -> None:
    gateway.model_errors.extend([errors.Unavailable("starting"), errors.Unavailable("starting")])
    async with AsyncClient(gateway.address, retries=FAST) as client:
        assert len(await client.models()) == 3
    assert gateway.num_model_calls == 3


@given(attempt=st.integers(0, 5000), asked=st.one_of(st.none(), st.floats(0, 40)), retries=st.integers(0, 6000))
def test_waits_are_bounded(attempt: int, asked: float | None, retries: int) -> None:
    policy = RetryPolicy(retries, backoff_s=0.1, max_backoff_s=2.0, max_wait_s=30.0)
    delay_s = policy.delay_s(errors.Overloaded("full", retry_after_s=asked), attempt)
    if attempt >= retries or (asked or 0) > 30:
        assert delay_s is None
    else:
        assert delay_s is not None
        assert (asked or 0) <= delay_s <= (asked or 0) + min(2.0, 0.1 * 2.0 ** min(attempt, 30))


async def test_attempts_share_one_deadline() -> None:
    lost = errors.Unavailable("lost", retry_after_s=0.05)
    transport = FakeTransport([lost], [lost], list(rounds()))
    async with AsyncClient(transport=transport, timeout_s=10) as client:
        await client.generate("hello")
    first, second, third = (timeout_s for timeout_s in transport.timeouts if timeout_s is not None)
    assert 10 >= first > second + 0.04
    assert second > third + 0.04
    assert transport.num_closed_calls == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: AsyncClient("ftp://127.0.0.1:8001"),
        lambda: AsyncClient("http:///v1"),
        lambda: AsyncClient("127.0.0.1:99999"),
        lambda: AsyncClient(timeout_s=0),
        lambda: AsyncClient(retries=-1),
        lambda: RetryPolicy(backoff_s=math.nan),
    ],
)
def test_impossible_settings_are_refused(make: object) -> None:
    with pytest.raises(errors.ConfigError):
        make()  # type: ignore[operator]
