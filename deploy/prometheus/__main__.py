"""`python -m deploy.prometheus`: promtool over configuration, rules and their tests; exit 1 if any of it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.prometheus.binaries import NotFound, find

FOLDER = Path(__file__).parent


def main() -> int:
    try:
        promtool = str(find("promtool"))
    except NotFound as error:
        sys.stderr.write(f"{error}\n")
        return 1
    tests = sorted(str(path) for path in (FOLDER / "tests").glob("*.yml"))
    checks = (["check", "config", str(FOLDER / "prometheus.yml")], ["test", "rules", *tests])
    return max(subprocess.run([promtool, *check], timeout=300).returncode for check in checks)


if __name__ == "__main__":
    sys.exit(main())
