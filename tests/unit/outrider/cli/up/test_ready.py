"""A start by `outrider up` of workers that were named by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli.up.endpoints import Endpoints, Gateway, StartedWorker
from outrider.cli.up.supervisor import Supervisor
from outrider.wire.errors import IncompatiblePair
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import merge_settings

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
