"""Runs a module that imports torch in a child process and yields its events. For `alpha`, `doctor` and `train-head`."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping
from typing import Any

from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.processes import POLL_S, Child, Event
from outrider.wire.processes.stop_flag import StopFlag


def run_module(
    module: str, task: dict[str, Any], what: str, grace_s: float, env: Mapping[str, str] | None = None
) -> Generator[Event, None, None]:
    """Run `python -m module` as a child process, with the task as a line of JSON on its stdin. Yield the child's events
    until the child ends.

    what: name of the child in errors. env: the child's environment; None = that of this process. When the generator is
    closed, the child has `grace_s` seconds to stop. On SIGINT, SIGTERM and SIGHUP this process stops the child and
    raises KeyboardInterrupt; a second such signal kills the child. Raises ConfigError with the message of the child's
    event "failed", and OutriderError if the child's exit code is not 0. Call it from the main thread.
    """
    stop = StopFlag()
    with stop.installed():
        args = [sys.executable, "-m", module]
        child = Child(what, args, stdin=json.dumps(task) + "\n", notify=stop.notify, env=env)
        try:
            while not stop.is_set():
                has_ended = child.has_ended()
                if child.events.empty() and not has_ended:
                    stop.wait(POLL_S)
                    continue
                if child.events.empty() and child.returncode == 0:
                    return
                if child.events.empty():
                    reason = " / ".join(child.last_lines(5)) or f"it ended with exit code {child.returncode}"
                    raise OutriderError(f"the {what} gave no result: {reason}")
                event = child.events.get()
                if event["event"] == "failed":
                    raise ConfigError(event["message"])
                yield event
            raise KeyboardInterrupt
        finally:
            child.stop(grace_s, lambda: stop.is_hurried)
            child.close()
