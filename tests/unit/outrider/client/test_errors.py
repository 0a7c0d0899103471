"""The error tree at the client."""

import pytest

from outrider.client import AsyncClient, RetryPolicy
from outrider.wire import errors
from tests.unit.outrider.client.scripted_gateway import ScriptedGateway, failing

FAST = RetryPolicy(retries=2, backoff_s=0.01)


@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        (errors.InvalidRequest("top_p is 2", param="top_p"), errors.InvalidRequest),
        (errors.ModelNotFound("no model 'x'", param="model"), errors.ModelNotFound),
        (errors.RequestTooLarge("too big"), errors.InvalidRequest),
        (errors.Overloaded("queue is full", retry_after_s=1.5), errors.Overloaded),
        (errors.Unavailable("target restarts"), errors.Unavailable),
        (errors.WorkerLost("stream ended"), errors.Unavailable),
        (errors.DeadlineExceeded("no round in 30 s"), errors.DeadlineExceeded),
        (errors.WorkerFault("bug"), errors.OutriderError),
        (errors.Unauthenticated("no such key"), errors.Unauthenticated),
        (errors.Forbidden("not for this key"), errors.Forbidden),
        (errors.RateLimited("this key is over its limit", retry_after_s=40.0), errors.RateLimited),
    ],
)
async def test_the_error_tree_crosses_the_wire(
    gateway: ScriptedGateway, sent: errors.OutriderError, raised: type[errors.OutriderError]
) -> None:
    gateway.scripts.append(failing(sent))
    async with AsyncClient(gateway.address, retries=0) as client:
        with pytest.raises(raised) as caught:
            await client.generate("hello")
    assert type(caught.value) is raised
    assert caught.value.message == sent.message
    assert caught.value.param == sent.param
    assert caught.value.retry_after_s == sent.retry_after_s


async def test_a_message_over_the_limit_is_not_retried_as_overload(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address, retries=FAST) as client:
        with pytest.raises(errors.RequestTooLarge, match="larger than max"):
            await client.generate("x" * (1 << 21))
    assert gateway.requests == []
