"""A real gRPC server with GenerationService whose answers a test scripts: for the SDK and the commands on top of it."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc
from outrider.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    TOKEN_KIND_ACCEPTED,
    TOKEN_KIND_BONUS,
    TOKEN_KIND_PLAIN,
    TOKEN_KIND_RECOVERED,
)
from outrider.wire.errors import OutriderError
from outrider.wire.transport.rpc import abort
from outrider.wire.transport.serving import ServerThread

Script = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]

USAGE = pb.Usage(
    num_prompt_tokens=4,
    num_completion_tokens=7,
    num_rounds=2,
    num_draft_tokens=5,
    num_accepted_tokens=4,
    num_plain_steps=1,
    num_wasted_tokens=3,
    seed=2**63 + 5,
    num_cached_prompt_tokens=3,
    num_accepted_prediction_tokens=2,
    num_rejected_prediction_tokens=1,
)
TEXT = " the quick red fox ran!\n"


def rounds(choice: int = 0) -> list[pb.GenerateResponse]:
    """One answer: a round with a rejection, one without, and a plain step."""

    def token(token_id: int, kind: Any, text: str) -> pb.GeneratedToken:
        return pb.GeneratedToken(id=token_id, kind=kind, text=text)

    accepted, recovered = TOKEN_KIND_ACCEPTED, TOKEN_KIND_RECOVERED
    common = {"request_id": "r-1", "choice": choice}
    return [
        pb.GenerateResponse(
            tokens=[token(1, accepted, " the"), token(2, accepted, " quick"), token(3, recovered, " red")],
            text_delta=" the quick red",
            num_drafted=3,
            num_accepted=2,
            timings=pb.RoundTimings(total_us=4000, deliver_us=2000, verify_us=1750, overhead_us=250),
            **common,
        ),
        pb.GenerateResponse(
            tokens=[token(4, accepted, " fox"), token(5, accepted, " ran"), token(6, TOKEN_KIND_BONUS, "!")],
            text_delta=" fox ran!",
            num_drafted=2,
            num_accepted=2,
            **common,
        ),
        pb.GenerateResponse(
            tokens=[token(7, TOKEN_KIND_PLAIN, "\n")],
            text_delta="\n",
            finish_reason=FINISH_REASON_STOP if choice == 0 else FINISH_REASON_LENGTH,
            stop_reason="END" if choice == 0 else "",
            usage=USAGE,
            **common,
        ),
    ]


async def answer(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """All choices, interleaved round by round."""
    for together in zip(*(rounds(choice) for choice in range(request.num_choices)), strict=True):
        for message in together:
            yield message


def failing(error: OutriderError, num_rounds: int = 0) -> Script:
    """`num_rounds` rounds, then the error."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for message in rounds()[:num_rounds]:
            yield message
        raise error

    return script


def hanging(num_rounds: int = 1) -> Script:
    """`num_rounds` rounds, then nothing for ever."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for message in rounds()[:num_rounds]:
            yield message
        await asyncio.Event().wait()

    return script


def eventually(event: threading.Event) -> bool:
    """Wait a while for what the gateway notes. Return whether it came."""
    return event.wait(5)


class ScriptedGateway(gateway_pb2_grpc.GenerationServiceServicer):
    """Plays `scripts` in turn, then `answer`. Remembers what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.scripts: deque[Script] = deque()
        self.model_errors: deque[OutriderError] = deque()
        self.requests: list[pb.GenerateRequest] = []
        self.num_model_calls = 0
        self.asked = threading.Event()
        self.cancelled = threading.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.asked.set()
        script = self.scripts.popleft() if self.scripts else answer
        try:
            async for message in script(request):
                yield message
        except OutriderError as error:
            await abort(context, error)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def GetModels(
        self, request: pb.GetModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelsResponse:
        self.num_model_calls += 1
        if self.model_errors:
            await abort(context, self.model_errors.popleft())
        return pb.GetModelsResponse(
            models=[
                pb.Model(id="pair", context_limit=512, vocab_size=4096, draft_id="small", drafters=["model"]),
                pb.Model(id="guessed", context_limit=512, vocab_size=4096, draft_id="ngram", drafters=["ngram"]),
                pb.Model(id="alone", context_limit=256, vocab_size=4096),
            ]
        )

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        return ["outrider.v1.GenerationService"]


@contextmanager
def serving() -> Iterator[ScriptedGateway]:
    gateway, server = ScriptedGateway(), ServerThread()
    gateway.address = server.start(gateway.add_to, "127.0.0.1", 0, 1 << 20)
    try:
        yield gateway
    finally:
        server.stop(0)
