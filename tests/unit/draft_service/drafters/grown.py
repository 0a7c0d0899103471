"""Drafts without a model, that grow."""

from typing import Any

from outrider.engine.worker.engine_thread import EngineThread


class AtOnce(EngineThread):
    """Answers go out when they are made."""

    def __init__(self) -> None:
        super().__init__(lambda engine: None, lambda answers: None)  # type: ignore[arg-type, return-value]
        self.num_flushes = 0

    def answer(self, send: Any) -> None:
        send()

    def flush(self) -> None:
        self.num_flushes += 1
