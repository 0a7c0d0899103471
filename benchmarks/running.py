"""Run a whole Outrider while a benchmark measures it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.cli.progress import StartProgress
from outrider.cli.up.endpoints import Endpoints
from outrider.cli.up.supervisor import Supervisor
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import SystemConfig


@contextlib.contextmanager
def running(
    target: Mapping[str, Any],
    draft: Mapping[str, Any] | None,
    gateway: Mapping[str, Any] | None = None,
    *,
    with_ray: bool = False,
    gateway_module: str = "gateway",
) -> Iterator[Endpoints]:
    """Run a system with settings as `outrider up` has them, on free ports. Every process ends with the block.

    with_ray: the launcher starts the workers, as without `--no-ray`; otherwise they are plain processes.

    gateway_module: run as the gateway, with its command line.

    Signals keep their own meaning, so that Ctrl-C ends a measurement at once.
    """
    if gateway_module != "gateway":  # not installed, and children do not look into the current folder
        os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))
    ports = {"port": 0, "grpc_port": 0}
    ray: dict[str, Any] | None = {} if with_ray else None
    config = SystemConfig.read({"target": target, "draft": draft, "ray": ray, "gateway": {**ports, **(gateway or {})}})
    with (
        Supervisor(config, StopFlag(), gateway_module=gateway_module) as supervisor,
        StartProgress(Console(stderr=True)) as progress,
    ):
        yield supervisor.start(progress)
