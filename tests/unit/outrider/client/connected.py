"""Clients of a scripted gateway."""

from collections.abc import AsyncGenerator

from outrider.v1 import gateway_pb2 as pb


class FakeTransport:
    """Answers from a list; an exception in it is raised. Remembers deadlines and its end."""

    def __init__(self, *attempts: list[pb.GenerateResponse | Exception]) -> None:
        self.attempts = list(attempts)
        self.timeouts: list[float | None] = []
        self.num_closed_calls = 0
        self.num_closes = 0

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        self.timeouts.append(timeout_s)
        try:
            for item in self.attempts.pop(0):
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.num_closed_calls += 1

    async def get_models(self, request: pb.GetModelsRequest, timeout_s: float | None) -> pb.GetModelsResponse:
        self.timeouts.append(timeout_s)
        return pb.GetModelsResponse()

    async def close(self) -> None:
        self.num_closes += 1
