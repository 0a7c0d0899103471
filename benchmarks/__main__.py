"""Run one benchmark by its name, or list them: `python -m benchmarks [NAME [--help]]`, or `make bench-NAME`.

A name is a suite of `benchmarks.suites`, which `benchmarks.comparison` runs, or a module of this folder.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

from benchmarks.common import Report, parser
from benchmarks.comparison import run
from benchmarks.suites import DEFAULTS, SUITES

HERE = Path(__file__).parent


def programs() -> dict[str, str]:
    """Return the modules with a command line of their own, by name, and the first line of each description."""
    found = dict[str, str]()
    for path in sorted(HERE.iterdir()):
        source = path / "__main__.py" if path.is_dir() else path
        if source.suffix == ".py" and source != Path(__file__) and source.is_file():
            text = source.read_text(encoding="utf-8")
            if '__name__ == "__main__"' in text:
                found[path.stem.replace("_", "-")] = text.partition('"""')[2].partition("\n")[0]
    return found


def list_all() -> None:
    """Print the names of all benchmarks with a line each."""
    lines = {name: str(entry.make.__doc__).partition("\n")[0] for name, entry in SUITES.items()}
    for name, line in sorted({**lines, **programs()}.items()):
        print(f"{name:16} {line}")


def main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        list_all()
        return 0
    name = args[0]
    if name in SUITES:
        entry = SUITES[name]
        options = parser(entry.make.__doc__, **{**DEFAULTS, **entry.defaults}).parse_args(args[1:])
        suite = entry.make(options)
        report = Report(name, suite.title)
        code = run(suite, report)
        report.write(options.results)
        return code
    module = f"benchmarks.{name.replace('-', '_')}"
    if importlib.util.find_spec(module) is None:
        print(f"no benchmark is named {name}; python -m benchmarks lists them", file=sys.stderr)
        return 2
    sys.argv = [module, *args[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
