"""What a section is given: where it runs, at which size, and the functions that report its findings."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

REPO = Path(__file__).resolve().parents[2]
DEMO_TARGET, DEMO_DRAFT = REPO / "models/demo/target", REPO / "models/demo/draft"
DEMO_EAGLE3, DEMO_MEDUSA = REPO / "models/demo/eagle3", REPO / "models/demo/medusa"
SHARED_MEMORY = Path("/dev/shm")
"""A file system in memory, from which weights reach a GPU without a disk."""
SPARE_BYTES = 1 << 30
"""Bytes that stay free where a section writes models."""


@dataclass
class Bench:
    """One run of one section."""

    events: TextIO
    """Where events go, a line of JSON each; the parent reads them."""
    device: str = "cuda"
    """cuda, or cpu in a rehearsal."""
    rehearse: bool = False
    """Run at the sizes of a rehearsal, whose figures say nothing."""
    folders: list[Path] = field(default_factory=list)
    """Made for models; the parent removes what is left of them."""

    @property
    def on_card(self) -> bool:
        return self.device.startswith("cuda")

    def size(self, full: Any, small: Any) -> Any:
        """Return the first on a card and the second in a rehearsal."""
        return small if self.rehearse else full

    def tell(self, kind: str, **values: Any) -> None:
        """Report a row of the table `kind`; its columns are the names of the values."""
        self._write({"kind": kind, **values})

    def find(self, text: str) -> None:
        """Report that something is not as it has to be. The section then counts as failed, and goes on."""
        self._write({"kind": "finding", "text": text})

    def sum_up(self, text: str) -> None:
        """Report the section's own line of the kit's output; the last one counts."""
        self._write({"kind": "summary", "text": text})

    def folder(self, num_bytes: int = 0) -> Path:
        """Return a new empty folder with room for so many bytes, in memory where it has the room."""
        parent = None
        if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > num_bytes + SPARE_BYTES:
            parent = SHARED_MEMORY
        made = Path(tempfile.mkdtemp(prefix="outrider-gpu-", dir=parent))
        self.folders.append(made)
        self._write({"kind": "folder", "path": str(made)})
        return made

    def _write(self, event: Mapping[str, Any]) -> None:
        self.events.write(json.dumps(event, default=str) + "\n")
        self.events.flush()


def own_stdout() -> TextIO:
    """Return this process's stdout for events alone; whatever else is printed goes to stderr from now on."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events
