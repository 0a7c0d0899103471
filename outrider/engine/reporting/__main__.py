"""One section of `outrider report`, in a process of its own: what it breaks is broken for no other.

Runs as `python -m outrider.engine.reporting` with {"section": NAME, ...} in JSON on stdin; prints a JSON object for
each thing that it finds, as it finds it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.engine.loading.loader import resolve_device
from outrider.engine.reporting.laws import laws
from outrider.engine.reporting.steps import StepsTask, steps
from outrider.engine.widening import Sizes, widen_folder
from outrider.wire.places import cache_folder
from outrider.wire.processes import Event, tell_all
from outrider.wire.settings.system import demo_model

SIZES = {
    "draft": Sizes(hidden=2048, intermediate=5632, heads=32, kv_heads=8, extra_layers=20),
    "target": Sizes(hidden=3072, intermediate=8192, heads=48, kv_heads=8, extra_layers=22),
}
"""Of the demo pair widened: 1.0 and 2.8 thousand million parameters."""
DRIVER = Path("/proc/driver/nvidia/version")


def devices() -> Iterator[Event]:
    """Yield what torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [torch.cuda.get_device_properties(index) for index in range(count)]
    yield {
        "event": "devices",
        "cuda": torch.version.cuda,
        "driver": DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None,
        "gpus": [{"name": each.name, "memory_bytes": each.total_memory} for each in every],
    }


def pair() -> Iterator[Event]:
    """Widen the demo pair, in bfloat16, and yield where it lies. It is kept for the next report."""
    for role, sizes in SIZES.items():
        source, folder = Path(demo_model(role)), widened_folder(role)
        said = "made by an earlier report"
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.part")
            said = widen_folder(source, unfinished, sizes, torch.bfloat16)
            unfinished.rename(folder)
        yield {"event": "widened", "role": role, "folder": str(folder), "said": said}


def widened_folder(role: str) -> Path:
    return cache_folder() / f"report-{__version__}" / role


def laws_on(device: str) -> Iterator[Event]:
    """Yield how the acceptance rules' outputs fit the law that they should have, on a device."""
    return laws(resolve_device(device))


def model_on(**task: Any) -> Iterator[Event]:
    """Yield how a model loads, and what its steps take."""
    return steps(StepsTask(**task))


SECTIONS: dict[str, Callable[..., Iterator[Event]]] = {
    "devices": devices,
    "pair": pair,
    "laws": laws_on,
    "model": model_on,
}


def main() -> int:
    task = json.loads(sys.stdin.readline())
    section = SECTIONS[task.pop("section")]
    return tell_all(lambda: section(**task))


if __name__ == "__main__":
    sys.exit(main())
