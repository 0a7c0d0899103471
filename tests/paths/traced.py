"""A service whose function calls are noted: `python -m tests.paths.traced FOLDER MODULE ARGS`.

`tests.paths` starts the services so. At each SIGUSR2 what was entered since the last one is written to
FOLDER/MODULE.N.json, N counting from 0, and the next window begins.
"""

import inspect
import itertools
import json
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

entered: dict[CodeType, tuple[str, float]] = {}
"""File and time of the first entry (monotonic seconds, one clock for all processes of a machine), by function."""


def note(frame: FrameType, event: str, _argument: object) -> None:
    # By its globals, a constructor that dataclasses wrote belongs to the file of its class.
    if event == "call" and frame.f_code not in entered and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        entered[frame.f_code] = (str(frame.f_globals.get("__file__")), time.monotonic())


def write_windows(folder: Path, module: str) -> None:
    """Write and begin a window at each signal."""
    count = itertools.count()

    def write(_number: int, _frame: FrameType | None) -> None:
        found = dict(entered)
        entered.clear()
        functions = {f"{id(code)} {code.co_qualname}": where for code, where in found.items()}
        path = folder / f"{module}.{next(count)}.json"
        path.with_suffix(".part").write_text(json.dumps(functions))
        path.with_suffix(".part").rename(path)

    signal.signal(signal.SIGUSR2, write)


def main() -> None:
    folder, module = Path(sys.argv[1]), sys.argv[2]
    write_windows(folder, module)
    threading.setprofile(note)
    sys.setprofile(note)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
