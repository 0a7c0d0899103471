"""A compiler of grammars that takes as long as the test lets it."""

import os
import threading


class _Slow:
    """Grammars that take as long to compile as the test wants."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.compiled: list[str] = []
        self.niceness = 0

    def get(self, text: str) -> None:
        return None

    def compile(self, text: str) -> str:
        self.may_go_on.wait(20)
        self.compiled.append(text)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return text
