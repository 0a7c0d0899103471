"""Runs a system for one Python program: the process that `outrider.LLM` starts. It ends when the program ends.

It reads one line of JSON from stdin: the models, the settings and the program's process id. It writes one line of JSON
to stdout: the event "ready" with the gateway's address, or "failed" with the reason. Progress goes to stderr.
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
from outrider.cli.up.supervisor import ProcessFailed, Supervisor
from outrider.cli.up.up import log_to
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.stop_flag import StopFlag, StopRequested
from outrider.wire.settings.config import GatewayConfig, WorkerConfig
from outrider.wire.settings.system import SystemConfig, gateway_config

_LOOK_S = 0.2
"""Seconds between two checks whether the program still runs."""
_DECIDED = frozenset(
    {
        *("model", "host", "port", "grpc_port", "metrics_port", "target", "draft", "target_for_draft", "registry"),
        *("model_name", "api_keys", "tls_dir", "public_tls_dir"),
    }
)
"""Names of the settings that the program must not give. Addresses and ports are chosen here, since only the program
calls the gateway, and the arguments `target` and `draft` of LLM name the models."""
_DECIDED_VARIABLES = frozenset(
    f"OUTRIDER_{part}_{name}".upper() for part in ("target", "draft", "gateway") for name in _DECIDED
)
"""Names of the environment variables for these settings. They are ignored: they are meant for services on this machine,
not for an LLM."""


def system_of(target: object, draft: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a system, in the form that `SystemConfig.read` accepts, from the arguments of
    `outrider.LLM`.

    target, draft: a model, or a worker's settings by name; draft=None means no draft. settings: settings of all workers
    and of the gateway, by name. Raises ConfigError for a name that is no such setting.
    """
    workers: dict[str, Any] = {}
    for role, part in (("target", target), ("draft", draft)):
        if isinstance(part, Mapping):
            workers[role] = dict(part)
        elif part is not None:
            workers[role] = {"model": part}
    gateway: dict[str, Any] = {"port": 0, "grpc_port": 0}
    for name, value in settings.items():
        is_worker = name in WorkerConfig.model_fields
        is_gateway = name in GatewayConfig.model_fields
        if name in _DECIDED or not (is_worker or is_gateway):
            raise ConfigError(
                f"{name} is no setting of an LLM: it takes those that target and draft both have, and a gateway's; one "
                f'of the target alone goes into target={{"model": ..., "{name}": ...}}'
            )
        if is_gateway:
            gateway[name] = value
        if is_worker:
            for worker in workers.values():
                worker.setdefault(name, value)
    # A request of the program waits as long as it may run: the program sends as many as run at once.
    gateway.setdefault("max_queue_wait_s", gateway_config(gateway, target="127.0.0.1:0").request_timeout_s)
    return {**workers, "gateway": gateway, "ray": None}


def remove_variables() -> None:
    """Remove from this process's environment the variables of those settings that `outrider.LLM` chooses itself, such
    as ports. The processes of the system inherit all other variables.
    """
    for name in list(os.environ):
        if name.upper() in _DECIDED_VARIABLES:
            del os.environ[name]


def main() -> int:
    """Run the system of an `outrider.LLM` until its program ends or a signal arrives. Return the exit code."""
    remove_variables()
    task = json.loads(sys.stdin.readline())
    stop = StopFlag()
    stop.install()
    threading.Thread(target=_end_with, args=(task["parent"], stop), name="parent", daemon=True).start()
    console = note_console()
    if not task["progress"]:
        console = Console(quiet=True)
    try:
        config = SystemConfig.read(system_of(task["target"], task["draft"], task["settings"]))
        with Supervisor(config, stop, log_to(console, False, stop)) as system:
            with StartProgress(console) as progress:
                endpoints = system.start(progress)
            max_running = gateway_config(config.gateway, target="127.0.0.1:0").max_running
            _write_event(event="ready", address=endpoints.grpc, max_running=max_running)
            system.watch()
    except StopRequested:
        return 0
    except OutriderError as error:
        log_lines = list[str]()
        if isinstance(error, ProcessFailed):
            log_lines = error.log_lines
        is_config = isinstance(error, ConfigError)
        _write_event(event="failed", is_config=is_config, message=error.message, log_lines=log_lines)
        return 1
    return 0


def _end_with(parent: int, stop: StopFlag) -> None:
    """Wait until the process `parent` has ended; then stop the system and end running requests at once."""
    if hasattr(os, "pidfd_open"):  # Linux
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(parent)], [], [])
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    stop.is_hurried = True
    stop.set()


def _write_event(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
