"""Children: whose modules they import, and how a second signal reaches one that is being waited for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.wire.processes.processes import Child
from outrider.wire.processes.stop_flag import StopFlag

_STUBBORN = """
import signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
print('{"event": "ready"}', flush=True)
while len(got) < int(sys.argv[1]):
    time.sleep(0.01)
"""


_BESIDE_CALLS = """
import sys, threading
import outrider.cli
import grpc
from concurrent.futures import ThreadPoolExecutor
from outrider.wire.processes.processes import Child
server = grpc.server(ThreadPoolExecutor(1))
channel = grpc.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
server.start()
def call():
    while True:
        try:
            channel.unary_unary("/no/service")(b"", timeout=1)
        except grpc.RpcError:
            pass
threading.Thread(target=call, daemon=True).start()
for _ in range(20):
    child = Child("one", [sys.executable, "-c", ""])
    assert child.process.wait(30) == 0, child.last_lines(5)
    child.close()
"""


def test_a_child_started_during_calls_runs_none_of_grpcs_handlers() -> None:
    """They aborted 1 of 40 and left a line in the log of every other."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", _BESIDE_CALLS], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_of_our_name_where_the_user_is_hides_none_of_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outrider").mkdir()
    (tmp_path / "outrider" / "__init__.py").write_text("raise RuntimeError('of the user')")
    monkeypatch.chdir(tmp_path)
    child = Child("one", [sys.executable, "-m", "outrider.wire.processes.processes"], env=dict(os.environ))
    code = child.process.wait(30)
    lines = child.last_lines(5)
    child.close()
    assert (code, lines) == (0, [])


@pytest.mark.parametrize(("signals", "code"), [(2, 0), (3, -signal.SIGKILL)])
def test_a_second_signal_shortens_a_childs_grace(signals: int, code: int) -> None:
    flag = StopFlag()
    child = Child("one", [sys.executable, "-c", _STUBBORN, str(signals)])
    child.events.get(timeout=30)
    flag._on_signal(signal.SIGINT, None)
    child.request_stop()
    time.sleep(0.2)
    flag._on_signal(signal.SIGINT, None)
    began = time.monotonic()
    child.stop(20.0, lambda: flag.is_hurried, 0.5)
    child.close()
    assert time.monotonic() - began < 5
    assert child.returncode == code


def test_the_end_of_a_child_ends_a_wait_and_its_output_is_complete() -> None:
    stop = StopFlag()
    say = "import json; [print(json.dumps({'event': str(number)})) for number in range(100)]"
    child = Child("one", [sys.executable, "-c", say], notify=stop.notify)
    while not child.has_ended():
        stop.wait()
    assert [child.events.get_nowait()["event"] for _ in range(100)] == [str(number) for number in range(100)]
    child.close()


def test_ctrl_c_while_the_command_line_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "outrider", "up"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
