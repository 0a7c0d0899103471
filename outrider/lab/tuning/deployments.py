"""The ways in which a pair can be placed, and what each makes at every concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from outrider.cli.progress import StageProgress, StartProgress
from outrider.cli.up.supervisor import Endpoints, Supervisor, own_cores
from outrider.cli.up.up import log_to
from outrider.lab.load.figures import RungFigures
from outrider.lab.load.ladder import Plan, climb
from outrider.lab.load.load import Load
from outrider.lab.tuning.money import COLOCATED, SPLIT
from outrider.lab.tuning.settings import max_draft_tokens
from outrider.wire.errors import ConfigError
from outrider.wire.processes.processes import StopFlag
from outrider.wire.settings.config import parse_cores
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import SystemConfig, merged

Workers = dict[str, dict[str, str | None]]
"""By role, target or draft: its settings, None where one was not given."""

_SPARE_TOKENS = 2 * 256
"""Tokens of each request beside prompt and answer: its last block, the longest of which (`flash`) have 256, and the
drafts behind its end. Doubling it takes memory for 512 tokens more of each request at once.
"""


def settings_of(workers: Workers, max_k: int = 1) -> SystemConfig:
    """Return the settings of a system of these workers, as plain processes."""
    gateway = {"port": 0, "grpc_port": 0, "max_draft_tokens": max_draft_tokens(max_k)}
    return merged({}, {**workers, "gateway": gateway, "ray": {"address": None}}, no_draft=False, no_ray=True)


def with_cache(workers: Workers, prompts: Sequence[str], max_tokens: int, num_at_once: int) -> Workers:
    """Return them with KV caches that hold so many of these requests at once, and no more: the pair on one GPU would
    else give most of it to the cache of whoever loads first.

    A token of a prompt has one byte of UTF-8 at least.
    """
    tokens = max(len(prompt.encode()) for prompt in prompts) + max_tokens + _SPARE_TOKENS
    return {role: {**own, "kv_cache_tokens": str(num_at_once * tokens)} for role, own in workers.items()}


def deployments_of(workers: Workers) -> dict[str, Workers]:
    """Return the pair on two devices, as it would be started, and on the target's alone.

    Raises ConfigError where that is the same.
    """
    pools: dict[str, Pool] = {pool.role: pool for pool in settings_of(workers).pools}
    cores = own_cores(pools)
    places = {}
    for role, pool in pools.items():
        own = cores[role]
        places[role] = {"cuda:0" if pool.worker.device in ("auto", "cuda") else pool.worker.device}
        if own is not None:
            places[role] = set(map(str, parse_cores(own)))
    if shared := places["target"] & places["draft"]:
        raise ConfigError(
            f"the pair is to be on one device and on two, and both would be on {' and '.join(sorted(shared))}: "
            "say --target-cores and --draft-cores, or --target-device cuda:0 and --draft-device cuda:1"
        )
    target = {**workers["target"], "cpu_cores": cores["target"]}
    colocated = {**workers["draft"], "cpu_cores": cores["target"], "device": workers["target"]["device"]}
    return {SPLIT: workers, COLOCATED: {"target": target, "draft": colocated}}


@contextmanager
def serving(
    workers: Workers, stop: StopFlag, notes: Console, *, max_k: int = 1, verbose: bool = False
) -> Iterator[Endpoints]:
    """Start the pair and its gateway, and end them afterwards. Raises OutriderError, or StopRequested."""
    with Supervisor(settings_of(workers, max_k), stop, log_to(notes, verbose, stop)) as system:
        with StartProgress(notes) as progress:
            endpoints = system.start(progress)
        yield endpoints


class _Stoppable(StageProgress):
    """Ends a measurement once the command is to end."""

    def __init__(self, console: Console, stop: StopFlag) -> None:
        super().__init__(console)
        self._stop = stop

    def tell(self, stage: str, text: str, done: int, total: int, unit: str = "") -> None:
        self._stop.check()
        super().tell(stage, text, done, total, unit)


async def ladder_of(load: Load, plan: Plan, notes: Console, stop: StopFlag) -> list[RungFigures]:
    """Measure at each concurrency, with speculation as the gateway chooses it and without. Raises StopRequested."""
    async with load.client() as client:
        with _Stoppable(notes, stop) as progress:
            return [rung async for rung in climb(client, load, plan, True, progress)]
