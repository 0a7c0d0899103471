"""A worker that drains, played."""

import threading
from dataclasses import dataclass, field


@dataclass
class PlayedHandle:
    """A worker whose one slot is open until `free`."""

    free: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    limits: list[float] = field(default_factory=list)

    def drain(self, timeout_s: float) -> None:
        self.limits.append(timeout_s)
        self.asked.set()
        assert self.free.wait(timeout_s)

    def wait_failed(self) -> None:
        return None
