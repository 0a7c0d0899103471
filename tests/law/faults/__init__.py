"""Workers and gateways with one thing replaced. Each module is run as a process, as `python -m draft_service` is."""

import sys

from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import DraftConfig, TargetConfig


def replace(owner: object, name: str, value: object) -> None:
    """setattr that refuses to add: a fault that replaces nothing would leave a sound worker."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name!r} any more: the fault must be put where the code now is")
    setattr(owner, name, value)


def run_target() -> None:
    """Run a target, with what was replaced, to its end."""
    from target_service.worker import start_worker

    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))


def run_draft() -> None:
    """The same of a draft."""
    from draft_service.worker import start_worker

    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
