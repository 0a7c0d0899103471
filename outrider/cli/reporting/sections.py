"""A section of the report: what it runs, and what became of it. One that fails is told, and the rest goes on."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.cli.supervisor import PartFailed
from outrider.wire.errors import OutriderError
from outrider.wire.processes import Event, StopRequested

_LOG_LINES = 20


class State(Enum):
    WAITING = "waiting"
    RAN = "ran"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass
class Section:
    title: str
    plan: str
    """What it runs, in a sentence."""
    run: Callable[[], Iterator[Event]]
    """Yields what it finds as it finds it; what came before it failed stays."""
    state: State = State.WAITING
    events: list[Event] = field(default_factory=list)
    error: str | None = None
    elapsed_s: float | None = None

    def carry_out(self) -> None:
        """Run it. Lets KeyboardInterrupt through, StopRequested as that, and keeps every other error.

        Of a bug, too: the command is for machines that nobody here has, and whoever sends the report cannot run the
        rest without us.
        """
        began_s = time.monotonic()
        try:
            for event in self.run():
                self.events.append(event)
            self.state = State.RAN
        except (KeyboardInterrupt, StopRequested):
            self.state = State.INTERRUPTED
            raise KeyboardInterrupt from None
        except PartFailed as error:
            self._fail("\n".join([error.message, *error.log_lines[-_LOG_LINES:]]))
        except OutriderError as error:
            self._fail(error.message)
        except Exception:
            self._fail(traceback.format_exc())
        finally:
            self.elapsed_s = time.monotonic() - began_s

    def _fail(self, error: str) -> None:
        self.state, self.error = State.FAILED, error

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "plan": self.plan,
            "state": self.state.value,
            "error": self.error,
            "elapsed_s": self.elapsed_s,
            "events": self.events,
        }
