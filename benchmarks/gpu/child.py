"""One section, as the process that the kit's parent starts: `python -m benchmarks.gpu.child MODULE`.

It imports what nearly every section needs, says so, waits for a line on stdin with the seconds that it has, and runs
the section. What it finds goes to stdout as lines of JSON, everything else to stderr; shortly before its time is up it
writes there where each of its threads stands.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.bench import Bench, own_stdout

OOM_SCORE = "1000"
"""Of /proc/self/oom_score_adj: when the host's memory ends, the kernel ends this process and not the kit's parent."""

IMPORTED = '{"kind": "imported"}\n'
"""The first event."""
STACKS_S = 1.0
"""Seconds before the limit at which the stacks are written."""


def main(argv: list[str]) -> int:
    events = own_stdout()
    module = argv[0]
    rehearse = "--rehearse" in argv
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    if "--alone" not in argv:
        _import_ahead()
    events.write(IMPORTED)
    events.flush()
    limit_s = sys.stdin.readline()
    if not limit_s:
        return 0  # the parent is gone
    faulthandler.dump_traceback_later(max(0.1, float(limit_s) - STACKS_S))
    bench = Bench(events, "cpu" if rehearse else "cuda", rehearse)
    try:
        importlib.import_module(module).run(bench)
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        bench._write({"kind": "crash", "text": last, "traceback": traceback.format_exc()})
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
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
