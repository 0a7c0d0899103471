"""Targets behind a name are replaced under a stream, as Kubernetes replaces pods of a Deployment: nothing is lost."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from tests.e2e.streams import Seen, greedy, speculative
from tests.samples import total
from tests.stack import DEMO_DRAFT, DEMO_TARGET, Process, read_metrics, stop_all

NUM_TOKENS = 200


def target(host: str, port: int) -> Process:
    where = ("--host", host, "--port", str(port), "--metrics-port", "0")
    return Process("target_service", ["--model", DEMO_TARGET, *where, "--drain-timeout-s", "60"], wait=False)


@pytest.mark.timeout(300)  # three workers and a gateway start, on a machine that may be busy with others
async def test_one_that_its_name_has_lost_finishes_what_runs_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    draft = Process("draft_service", ["--model", DEMO_DRAFT], wait=False)
    old, new = target("127.0.0.1", port), target("127.0.0.2", port)
    processes = [draft, old, new]
    try:
        for process in processes:
            _ = process.ready
        for name in ("targets", "drafts"):
            (tmp_path / name).write_text("127.0.0.1")
        drafts_port = draft.address.rpartition(":")[2]
        workers = ["--target", f"chat=dns:///targets:{port}", "--draft", f"small=dns:///drafts:{drafts_port}"]
        often = "@gateway.workers.named_workers.LOOK_S=0.02"
        gateway = Process(
            "tests.e2e.named_gateway", [often, str(tmp_path), *workers, "--port", "0", "--grpc-port", "0"]
        )
        processes.append(gateway)

        def samples() -> dict[str, float]:
            return read_metrics(f"http://{gateway.ready['http']}/metrics")

        def connected() -> dict[str, float]:
            lines = {name: value for name, value in samples().items() if name.startswith("outrider_worker_connected{")}
            return {name.partition('member="')[2].partition('"')[0]: value for name, value in lines.items()}

        async def until(holds: Callable[[], bool]) -> None:
            until_s = time.monotonic() + 20
            while not holds():
                assert time.monotonic() < until_s, samples()
                await asyncio.sleep(0.05)

        all_three = {f"chat-{old.address}": 1, f"chat-{new.address}": 1, f"small-{draft.address}": 1}
        without_old = {name: value for name, value in all_three.items() if name != f"chat-{old.address}"}
        async with AsyncClient(str(gateway.ready["grpc"])) as client:
            first, second = Seen(), Seen()
            stream = greedy(client, NUM_TOKENS)
            await first.read(stream, speculative(5))
            (tmp_path / "targets").write_text("127.0.0.1 127.0.0.2")
            await until(lambda: connected() == all_three)
            old.end()
            (tmp_path / "targets").write_text("127.0.0.2")
            # Before it is heard to drain it may be asked, refuse, and the request move.
            await until(lambda: total(samples(), "outrider_members", state="draining") == 1)
            await asyncio.sleep(0.2)
            assert connected()[f"chat-{old.address}"] == 1, "ten look-ups later"
            await second.read(greedy(client, NUM_TOKENS), lambda rounds: False)
            await first.read(stream, lambda rounds: False)
        assert first.ids == second.ids
        assert len(first.ids) == NUM_TOKENS
        await until(lambda: connected() == without_old)
        assert old.stop() == 0
        assert total(samples(), "outrider_retries_total") == 0
    finally:
        stop_all(reversed(processes))
