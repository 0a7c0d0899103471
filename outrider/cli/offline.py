"""A system for one program: the process that `outrider.LLM` starts, and that ends with the program, however that ends.

A line of JSON on stdin says what to start, and for which process. Lines of JSON on stdout say that it is "ready", with
what `LLM` calls, or has "failed", with why; how the start goes on is shown on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from outrider.cli.console import note_console
from outrider.cli.progress import StartProgress
from outrider.cli.up.supervisor import PartFailed, Supervisor
from outrider.cli.up.up import log_to
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.processes import StopFlag, StopRequested
from outrider.wire.settings.config import GatewayConfig, WorkerConfig
from outrider.wire.settings.system import SystemConfig, gateway_config

_LOOK_S = 0.2
"""Seconds between two looks whether the program is there. Doubling it lets the system outlive it for twice as long."""
_DECIDED = frozenset(
    {
        *("model", "host", "port", "grpc_port", "metrics_port", "target", "draft", "target_for_draft", "registry"),
        *("model_name", "api_keys", "tls_dir", "public_tls_dir"),
    }
)
"""Settings that are not the program's to make: nobody else calls, and `target` and `draft` say which models."""
_DECIDED_VARIABLES = frozenset(
    f"OUTRIDER_{part}_{name}".upper() for part in ("target", "draft", "gateway") for name in _DECIDED
)
"""Those of services on this machine, which an LLM has nothing to do with."""


def system_of(target: object, draft: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a system as `SystemConfig.read` takes it. target, draft: a model, or a worker's settings. settings: those
    that all workers have, and those of the gateway, by name. Raises ConfigError.
    """
    workers: dict[str, Any] = {}
    for role, part in (("target", target), ("draft", draft)):
        if part is not None:
            workers[role] = dict(part) if isinstance(part, Mapping) else {"model": part}
    gateway: dict[str, Any] = {"port": 0, "grpc_port": 0}
    for name, value in settings.items():
        is_worker, is_gateway = (name in kind.model_fields for kind in (WorkerConfig, GatewayConfig))
        if name in _DECIDED or not (is_worker or is_gateway):
            raise ConfigError(
                f"{name} is no setting of an LLM: it takes those that target and draft both have, and a gateway's; one "
                f'of the target alone goes into target={{"model": ..., "{name}": ...}}'
            )
        if is_gateway:
            gateway[name] = value
        for worker in workers.values() if is_worker else ():
            worker.setdefault(name, value)
    # Nobody waits in vain: the program has as many answers on their way as run at once.
    gateway.setdefault("max_queue_wait_s", gateway_config(gateway, target="127.0.0.1:0").request_timeout_s)
    return {**workers, "gateway": gateway, "ray": None}


def forget_variables() -> None:
    """Take what is decided out of the environment, of which all parts get the rest."""
    for name in [name for name in os.environ if name.upper() in _DECIDED_VARIABLES]:
        del os.environ[name]


def main() -> int:
    forget_variables()
    task = json.loads(sys.stdin.readline())
    stop = StopFlag()
    stop.install()
    threading.Thread(target=_end_with, args=(task["parent"], stop), name="parent", daemon=True).start()
    console = note_console() if task["progress"] else Console(quiet=True)
    try:
        config = SystemConfig.read(system_of(task["target"], task["draft"], task["settings"]))
        with Supervisor(config, stop, log_to(console, False, stop)) as system:
            with StartProgress(console) as progress:
                endpoints = system.start(progress)
            max_running = gateway_config(config.gateway, target="127.0.0.1:0").max_running
            _tell(event="ready", address=endpoints.grpc, max_running=max_running)
            system.watch()
    except StopRequested:
        return 0
    except OutriderError as error:
        log_lines = error.log_lines if isinstance(error, PartFailed) else []
        is_config = isinstance(error, ConfigError)
        _tell(event="failed", is_config=is_config, message=error.message, log_lines=log_lines)
        return 1
    return 0


def _end_with(parent: int, stop: StopFlag) -> None:
    """Ask for the end once the process that started this one is gone: nobody reads running answers then."""
    if hasattr(os, "pidfd_open"):  # Linux
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(parent)], [], [])
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    stop.hurry = True
    stop.set()


def _tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
