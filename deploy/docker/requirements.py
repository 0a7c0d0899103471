"""`python requirements.py EXTRA...`: what pyproject.toml asks for with these extras, a line each, for `pip install -r`.

An image installs it before the code is copied in, so that the layer lasts from one change of the code to the next.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the requirements of the project with these extras. Raises KeyError naming an extra that does not exist."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])) + "\n")
