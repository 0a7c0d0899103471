"""The commands of docs/deploy.md, run as they stand in a clone."""

import re
import subprocess
import sys
from pathlib import Path

from tests.compose.engine import Project, on_ports

PLACES = ("/srv/models", "/a/safe/place")
"""Paths in the documents that are the reader's own; in the test they are below its scratch folder."""
SUDO = 'command -v sudo >/dev/null || sudo() { "$@"; }; set -e\n'
"""For a root without the command."""


def blocks(text: str) -> dict[str, list[str]]:
    """Return the commands of the chapter on compose: what stands between fences, by heading."""
    chapter = text[text.index("\n## docker compose\n") :]
    chapter = chapter[: chapter.index("\n## ", 1)]
    found: dict[str, list[str]] = {}
    for section in re.split(r"^##+ ", chapter, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        found[heading] = re.findall(r"^```\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)
    return found


class Commands:
    """Runs them for a project, in its clone."""

    def __init__(self, project: Project, scratch: Path) -> None:
        self._project = project
        self._scratch = scratch
        self.blocks = blocks((project.folder / "docs/deploy.md").read_text())

    def place(self, path: str) -> Path:
        """Return where a path of the documents is in the test."""
        return self._scratch / path.lstrip("/")

    def run(self, heading: str, number: int = 0, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run a block of commands; output and errors together are its stdout."""
        script = self.blocks[heading][number]
        for place in PLACES:
            script = script.replace(place, str(self.place(place)))
        return self.shell(script, timeout_s)

    def shell(self, script: str, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run a script as one in the documents."""
        return subprocess.run(
            [*on_ports(), "bash", "-c", SUDO + script],
            cwd=self._project.folder,
            env=self._project.environment(Path(sys.executable).parent),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
