"""A whole Outrider that runs while a benchmark measures it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from outrider.cli.progress import StartProgress
from outrider.cli.stopping import StopFlag
from outrider.cli.supervisor import Endpoints, Supervisor
from outrider.cli.system import SystemConfig


@contextlib.contextmanager
def running(
    target: Mapping[str, Any],
    draft: Mapping[str, Any] | None,
    gateway: Mapping[str, Any] | None = None,
    *,
    with_ray: bool = False,
) -> Iterator[Endpoints]:
    """Settings as `outrider up` has them; ports are free ones. However the block is left, every process ends.

    with_ray: the launcher starts the workers, as without `--no-ray`; else they are plain processes.

    Signals keep their own meaning, so that Ctrl-C ends a measurement at once.
    """
    ports = {"port": 0, "grpc_port": 0}
    ray: dict[str, Any] | None = {} if with_ray else None
    config = SystemConfig.read({"target": target, "draft": draft, "ray": ray, "gateway": {**ports, **(gateway or {})}})
    with Supervisor(config, StopFlag()) as supervisor, StartProgress(Console(stderr=True)) as progress:
        yield supervisor.start(progress)
