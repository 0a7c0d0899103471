"""`python -m deploy.prometheus`: runs promtool on configuration, rules and their tests; exit code 1 if one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.prometheus.binaries import NotFound, find

FOLDER = Path(__file__).parent


def main() -> int:
    """Run promtool on configuration, rules and tests. Return the exit code, 0 if all of them pass."""
    try:
        promtool = str(find("promtool"))
    except NotFound as error:
        sys.stderr.write(f"{error}\n")
        return 1
    tests = sorted(str(path) for path in (FOLDER / "tests").glob("*.yml"))
    checks = (["check", "config", str(FOLDER / "prometheus.yml")], ["test", "rules", *tests])
    code = 0
    for check in checks:
        code = max(code, subprocess.run([promtool, *check], timeout=300).returncode)
    return code


if __name__ == "__main__":
    sys.exit(main())
