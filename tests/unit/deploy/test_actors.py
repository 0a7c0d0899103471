"""A Ray actor whose worker cannot start: it says why, and leaves the next try to its launcher."""

import threading
from typing import Any

import pytest

from deploy import actors
from deploy.actors import ActorSpec, StartFailure, WorkerActor
from deploy.placement import Placement
from outrider.wire.errors import ConfigError

WHY = "model is '/srv/m', and there is no such folder"


@pytest.mark.parametrize(
    ("error", "message", "is_logged"),
    [(ConfigError(WHY), WHY, True), (ValueError("a prompt"), "draft: ValueError('a prompt')", False)],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_worker_that_does_not_start_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    message: str,
    is_logged: bool,
    is_restarted: bool,
) -> None:
    """The first life waits to be asked; a later one ends alone where no launcher does it."""
    ends_alone = threading.Event()

    def fail(config: Any, ranks_folder: str | None) -> None:
        raise error

    monkeypatch.setattr(actors, "_node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actors, "_was_restarted", lambda: is_restarted)
    monkeypatch.setattr(actors, "_exit_alone", ends_alone.set)
    monkeypatch.setattr(actors, "_start", fail)
    spec = ActorSpec("draft-0", "draft", "draft", {"model": "m"}, Placement("cpu", 0.0, 1.0, None, None))
    assert WorkerActor(spec).outcome() == StartFailure(message)
    assert ends_alone.wait(10 if is_restarted else 0) is is_restarted
    (record,) = [record for record in caplog.records if record.name == "deploy.actors"]
    assert record.levelname == "ERROR"
    assert (WHY in record.getMessage()) is is_logged
