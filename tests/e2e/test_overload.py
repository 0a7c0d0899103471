"""More work than fits: everybody gets their turn, nobody fails for waiting, and places come back."""

import asyncio
import json
import signal
import time

import grpc
import grpc.aio
import httpx
import pytest

from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from tests.samples import total
from tests.stack import DEMO_DRAFT, Process, Stack, gateway_beside, running
from tests.waiting import until, wait_until

LONG_PROMPT = [5 + i % 4000 for i in range(1900)]
LONG_S = 60.0


async def post(base_url: str, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=LONG_S) as client:
        return await client.post(f"{base_url}/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})


async def test_requests_behind_the_prompts_of_others_do_not_fail(stack: Stack) -> None:
    """Feeding all prompts takes many times what one step may take; no reply comes for long, but steps are made."""
    with gateway_beside(stack, "@gateway.workers.worker_pools.ROUND_TIMEOUT_S=1") as gateway:
        answers = [post(f"http://{gateway.ready['http']}", prompt=LONG_PROMPT, max_tokens=2) for _ in range(8)]
        statuses = [answer.status_code for answer in await asyncio.gather(*answers)]
    assert statuses == [200] * 8


async def test_a_hung_target_is_given_up_and_its_request_goes_on_when_it_is_back() -> None:
    """Its server would answer for ever if only the engine hung; here all of it stands still."""
    with running(draft=None, gateway_args=("@gateway.workers.worker_pools.ROUND_TIMEOUT_S=2",)) as stack:
        whole = (await post(stack.http, prompt="def main():\n", max_tokens=400)).json()["choices"][0]["text"]
        answer = asyncio.create_task(post(stack.http, prompt="def main():\n", max_tokens=400))
        await asyncio.sleep(0.3)
        stack.target.popen.send_signal(signal.SIGSTOP)
        await until(lambda: not total(stack.metrics(), "outrider_worker_connected", worker="target"), LONG_S)
        stack.target.popen.send_signal(signal.SIGCONT)
        assert (await answer).json()["choices"][0]["text"] == whole


async def test_a_stopping_gateway_ends_its_streams_with_an_error(stack: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True, "speculation": {"enabled": False}}
    request = gateway_pb2.GenerateRequest(prompt="x", params={"max_tokens": 2000, "ignore_eos": True})
    ready = grpc.ChannelConnectivity.READY
    with gateway_beside(stack, "--drain-timeout-s", "1", draft=False) as gateway:
        events, num_messages = [], 0
        host, port = str(gateway.ready["http"]).split(":")
        async with (
            httpx.AsyncClient(timeout=LONG_S) as client,
            client.stream("POST", f"http://{gateway.ready['http']}/v1/completions", json=body) as response,
            grpc.aio.insecure_channel(str(gateway.ready["grpc"])) as channel,
        ):
            idle, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            await idle.readuntil(b"\r\n\r\n")
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            await call.read()
            gateway.popen.terminate()
            stopped_s = time.monotonic()
            await channel.wait_for_state_change(ready)  # GOAWAY: the next call is made elsewhere
            with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
                while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    num_messages += 1
            events = [line async for line in response.aiter_lines() if line]
            assert time.monotonic() - stopped_s < 5
            assert (await idle.read()).endswith(b"}"), "closed"
            writer.close()
        assert num_messages > 1, "what runs goes on"
        assert events[-1] == "data: [DONE]"
        assert "stopping" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        assert gateway.popen.wait(10) == 0


@pytest.mark.slow
def test_a_target_that_comes_back_as_another_model_is_not_used() -> None:
    with running(draft=None) as stack:
        port = stack.target.address.rpartition(":")[2]
        stack.target.stop()
        other = Process("target_service", ["--model", DEMO_DRAFT, "--port", port])
        try:
            why = lambda: str(httpx.get(f"{stack.http}/readyz").json()["reason"])  # noqa: E731
            wait_until(lambda: "came back as draft in" in why(), "it is not told apart")
            assert "with target in" in why()
        finally:
            other.stop()
