"""Runs a module that needs torch in a process of its own and yields what it reports. For `alpha` and `train-head`."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Generator, Mapping
from typing import Any

from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes import Child, Event, StopFlag


def events_of(
    module: str, task: dict[str, Any], what: str, grace_s: float, env: Mapping[str, str] | None = None
) -> Generator[Event, None, None]:
    """Start `python -m module` with the task as a line of its stdin; yield its events until it has ended.

    what: names it in errors. env: its environment, in place of ours. When the generator is closed, the process has
    `grace_s` seconds to stop; a second signal ends it at once. Raises ConfigError with what the event "failed" says,
    OutriderError when it ends in any other way than well, and KeyboardInterrupt on SIGTERM and SIGHUP, too, with the
    process stopped. Call from the main thread.
    """
    stop = StopFlag()
    with stop.installed():
        child = Child(what, [sys.executable, "-m", module], stdin=json.dumps(task) + "\n", env=env)
        try:
            while not stop.is_set():
                try:
                    event = child.events.get(timeout=0.1)
                except queue.Empty:
                    if child.returncode is None or not child.events.empty():
                        continue
                    if child.returncode == 0:
                        return
                    said = " / ".join(child.last_lines(5)) or f"it ended with exit code {child.returncode}"
                    raise OutriderError(f"the {what} gave no result: {said}") from None
                if event["event"] == "failed":
                    raise ConfigError(event["message"])
                yield event
            raise KeyboardInterrupt
        finally:
            child.stop(grace_s, lambda: stop.hurry)
            child.close()
