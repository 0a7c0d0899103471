"""A gateway's metrics and health on a port of their own."""

import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.service.front_door import in_process
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer
from tests.stack import START_S, Process
from tests.waiting import wait_until

PATHS = ("/healthz", "/readyz", "/metrics", "/sd")


def test_without_a_target_the_port_answers_until_the_event_loop_stops(tmp_path: Path) -> None:
    args = ["--target", "demo=dns:///localhost:9", "--port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    (log := tmp_path / "log").touch()
    process = Process("gateway", args, log, wait=False)
    try:
        said = "metrics and health on (.*)"
        found = wait_until(lambda: re.search(said, process.log()), "it does not say where", START_S)
        assert found
        with httpx.Client(base_url=f"http://{found[1]}", trust_env=False) as http:
            assert [http.get(path).status_code for path in PATHS] == [200, 503, 200, 200]
            assert http.head("/readyz").status_code == 503
            assert "no target" in http.get("/readyz").json()["reason"]
            assert http.get("/sd", headers={"host": "page.example"}).status_code == 403
            process.popen.send_signal(signal.SIGSTOP)
            with pytest.raises(httpx.ReadTimeout):
                http.get("/healthz", timeout=0.1)
            process.popen.send_signal(signal.SIGCONT)
            assert http.get("/healthz", timeout=START_S).status_code == 200
        assert process.stop() == 0
    finally:
        process.kill()


async def test_the_port_of_users_then_tells_no_metrics() -> None:
    for port, statuses in ((None, [200, 200, 200, 200]), (9000, [200, 200, 404, 404])):
        async with in_process(ScriptedGenerator(demo_tokenizer()), metrics_port=port) as http:
            assert [(await http.get(path)).status_code for path in PATHS] == statuses
