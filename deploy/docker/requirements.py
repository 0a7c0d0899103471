"""`python requirements.py EXTRA...`: prints the requirements of pyproject.toml with these extras, for `pip install -r`.

An image installs them before the code is copied in, so that their layer is still valid after changes of the code.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the requirements in a project's pyproject.toml, including those of these extras. Raises KeyError for an
    extra that the project does not have.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])) + "\n")
