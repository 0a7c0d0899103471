"""`python -m deploy.grafana [--check]`: write the dashboards' JSON, or say what is stale and exit 1."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import overview, worker

FOLDER = Path(__file__).parent / "dashboards"


def generated() -> Iterator[tuple[Path, str]]:
    """Each file and what belongs in it."""
    for name, module in (("overview", overview), ("worker", worker)):
        dashboard = module.dashboard().build()
        for number, panel in enumerate(dashboard.panels or (), start=1):
            panel.id_val = number
        yield FOLDER / f"{name}.json", JSONEncoder(sort_keys=True, indent=2).encode(dashboard) + "\n"


def main(argv: list[str]) -> int:
    check = argv == ["--check"]
    if argv and not check:
        sys.stderr.write(f"unknown arguments {argv}; usage: python -m deploy.grafana [--check]\n")
        return 2
    stale = [path for path, text in generated() if not path.exists() or path.read_text() != text]
    if check:
        for path in stale:
            sys.stderr.write(f"{path} is stale; run make dashboards\n")
        return bool(stale)
    for path, text in generated():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
