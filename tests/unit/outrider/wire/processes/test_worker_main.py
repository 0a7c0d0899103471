"""A worker that is told to end while it still loads."""

import subprocess
import sys

_LOADS_FOR_EVER = """
import os, sys, time
from outrider.wire.settings.config import DraftConfig
from outrider.wire.processes.worker_main import run_worker
class Loading:
    def __del__(self):
        os.write(1, b".")
        time.sleep(60)
run_worker("draft", DraftConfig, lambda config: Loading() and None, ["--model", "m", "--port", "0"])
"""
"""A signal's handler runs in `__del__`, which swallows what it raises."""


def test_a_signal_ends_a_worker_that_still_loads_wherever_its_main_thread_is() -> None:
    loading = [sys.executable, "-c", _LOADS_FOR_EVER]
    with subprocess.Popen(loading, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"."
        process.terminate()
        assert process.wait(30.0) == 0 and process.stderr.read() == b""
