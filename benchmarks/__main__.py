"""Run one benchmark by its name, or list them: `python -m benchmarks [NAME [--help]]`, or `make bench-NAME`."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from benchmarks.runner import run

HERE = Path(__file__).parent
MODULES = {
    "alpha": "alpha",
    "default": "default",
    "fairness": "fairness",
    "overload": "overload",
    "peers": "peers/benchmark",
    "soak": "soak",
}
"""Files of benchmarks that `benchmarks.runner` runs, by name. Each has a `BENCHMARK`."""
PACKAGES = {"gpu": "gpu/__main__", "host": "host/__main__"}
"""Files of benchmarks that have a command line of their own, by name."""


def describe_all() -> dict[str, str]:
    """Return the names of all benchmarks with the first line of each description."""
    found = dict[str, str]()
    for name, file in sorted({**MODULES, **PACKAGES}.items()):
        text = (HERE / f"{file}.py").read_text(encoding="utf-8")  # to import it would import torch
        found[name] = text.split('"""')[1].partition("\n")[0]
    return found


def main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        for name, line in describe_all().items():
            print(f"{name:16} {line}")
        return 0
    name, *rest = args
    if name in MODULES:
        module = importlib.import_module("benchmarks." + MODULES[name].replace("/", "."))
        return run(name, module.__doc__, module.BENCHMARK, rest)
    if name in PACKAGES:
        sys.argv = [f"benchmarks.{name}", *rest]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        return 0
    print(f"no benchmark is named {name}; python -m benchmarks lists them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
