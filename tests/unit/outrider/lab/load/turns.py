"""Turns of a load whose answers took so many seconds."""

from outrider.lab.load.figures import RequestBatch
from outrider.lab.load.load import RequestOutcome

REFUSED = RequestOutcome(0.0, None, 0.1, 429, "1")


def turns(seconds: list[float]) -> list[RequestBatch]:
    return [
        RequestBatch((RequestOutcome(0.0, 0.1, each, 200, None, None, {"completion_tokens": 10}),)) for each in seconds
    ]
