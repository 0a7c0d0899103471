"""One section, as the process that the kit's parent starts: `python -m benchmarks.gpu.child MODULE`.

It imports what nearly every section needs, says so, waits for a line on stdin, and runs the section. What it finds goes
to stdout as lines of JSON, everything else to stderr; on SIGUSR1, which comes when its time is up, it writes there
where each of its threads stands.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.bench import Bench, own_stdout

OOM_SCORE = "1000"
"""Of /proc/self/oom_score_adj: when the host's memory ends, the kernel ends this process and not the kit's parent."""

PR_SET_PDEATHSIG = 1
"""Of prctl (linux/prctl.h)."""

IMPORTED = '{"kind": "imported"}\n'
"""The first event."""


def main(argv: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a killed parent leaves no one on the GPU
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    events = own_stdout()
    module = argv[0]
    rehearse = "--rehearse" in argv
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    if "--alone" not in argv:
        _import_ahead()
    events.write(IMPORTED)
    events.flush()
    if not sys.stdin.readline():
        return 0  # the parent is gone
    bench = Bench(events, "cpu" if rehearse else "cuda", rehearse)
    try:
        importlib.import_module(module).run(bench)
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        bench._write({"kind": "crash", "text": last, "traceback": traceback.format_exc()})
        return 1
    finally:
        for folder in bench.folders:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _import_ahead() -> None:
    """Import what nearly every section needs. What cannot be imported is told by the section itself."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch")
        importlib.import_module("transformers.models.llama.modeling_llama")


def leave(code: int) -> NoReturn:
    """End the process at once: to take torch and a GPU's context apart in order takes seconds."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
