"""What `outrider up` says when all is ready: its commands work as they are printed, but for files and keys."""

from __future__ import annotations

import io
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.cli.up.endpoints import Endpoints, Gateway, StartedWorker
from outrider.cli.up.machine_shares import with_grpc_port
from outrider.cli.up.ready import show_ready
from outrider.cli.up.supervisor import Supervisor
from outrider.wire.errors import IncompatiblePair
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import merge_settings
from outrider.wire.telemetry.phases import phase_in

ENDPOINTS = Endpoints(
    [Gateway("127.0.0.1:1", "127.0.0.1:2", "https://127.0.0.1:1", "http://127.0.0.1:3")],
    [StartedWorker("target", "target", "127.0.0.1:3", None, "KV cache 64 tokens")],
    None,
)


NO_FLAGS: dict[str, dict[str, object]] = {
    "target": {"model": None},
    "draft": {"model": None},
    "gateway": {},
    "ray": {"address": None},
}


class Quiet:
    def progress(self, part: str, state: str, detail: str) -> None:
        """Show nothing."""


def said(gateway: dict[str, Any], endpoints: Endpoints = ENDPOINTS) -> str:
    out = io.StringIO()
    settings = merge_settings({"gateway": gateway}, NO_FLAGS, no_draft=False, no_ray=True, certificates=None)
    show_ready(Console(file=out, width=300), endpoints, settings)
    return out.getvalue()


def test_a_draft_that_is_not_used_ends_the_start_of_a_pair_named_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ["target at 127.0.0.1:3: another folder", "draft at 127.0.0.1:4: draft d does not fit target t"]
    gateway = replace(ENDPOINTS.gateways[0], refused=refused)
    monkeypatch.setattr(Supervisor, "_start_plain", lambda _: None)
    monkeypatch.setattr(Supervisor, "_start_gateway", lambda _, index: gateway)
    settings = merge_settings({}, NO_FLAGS, no_draft=False, no_ray=True, certificates=None)
    system = Supervisor(settings, StopFlag())
    assert system.start(Quiet(), needs_drafts=False).gateways == [gateway]
    with pytest.raises(IncompatiblePair, match=r"^the draft at 127\.0\.0\.1:4: draft d does not fit target t$"):
        system.start(Quiet())


def test_a_gguf_file_is_a_model_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(Supervisor, "_start_plain", lambda _: None)
    monkeypatch.setattr(Supervisor, "_start_gateway", lambda _, index: ENDPOINTS.gateways[0])
    flags = {**NO_FLAGS, "target": {"model": str(file)}}
    settings = merge_settings({}, flags, no_draft=True, no_ray=True, certificates=None)
    assert Supervisor(settings, StopFlag()).start(Quiet()).gateways == ENDPOINTS.gateways


def test_grpc_goes_to_the_next_free_port_where_that_of_http_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def grpc_port(gateway: dict[str, object]) -> object:
        settings = merge_settings({"gateway": gateway}, NO_FLAGS, no_draft=False, no_ray=True, certificates=None)
        return with_grpc_port(settings).gateway.get("grpc_port")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = grpc_port({"port": port - 1})
        assert isinstance(found, int) and found > port
        assert grpc_port({"port": port - 2, "metrics_port": port - 1}) == found
    assert grpc_port({"port": 0}) == 0
    assert grpc_port({"port": 9, "grpc_port": 12}) == 12
    assert grpc_port({}) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "2026-11-28 14:53 INFO target outrider.wire.telemetry.phases: reading weights, 2 MB",
            ("t", "reading weights, 2 MB"),
        ),
        ("(Actor pid=7) 2026 INFO draft outrider.wire.telemetry.phases: [draft-1] self-test", ("draft-1", "self-test")),
        ('(draft-1 pid=7) {"logger": "outrider.wire.telemetry.phases", "message": "[draft-1] b"}', ("draft-1", "b")),
        ('{"logger": "outrider.wire.telemetry.phases", "message"', None),
        ("2026-11-28 14:53:49,442 INFO target outrider.engine: reading weights", None),
    ],
)
def test_a_phase_of_a_worker_is_read_from_either_form_of_its_log(line: str, found: tuple[str, str] | None) -> None:
    assert phase_in("t", line) == found
