"""Starts a pair in each possible placement on devices, and measures each under load. For `outrider tune`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from outrider.cli.progress import StageProgress, StartProgress
from outrider.cli.up.endpoints import Endpoints
from outrider.cli.up.machine_shares import own_cores
from outrider.cli.up.supervisor import Supervisor
from outrider.cli.up.up import log_to
from outrider.lab.load.figures import LoadFigures
from outrider.lab.load.ladder import LadderPlan, climb
from outrider.lab.load.load import Load
from outrider.lab.tuning.money import COLOCATED, SPLIT
from outrider.lab.tuning.settings import max_draft_tokens
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.cores import parse_cores
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import SystemConfig, merge_settings

Workers = dict[str, dict[str, str | None]]
"""Settings of a pair's workers: workers[role][setting name], where the role is "target" or "draft". A value of None =
the user did not give the setting."""

_SPARE_TOKENS = 2 * 256
"""Number of tokens that the KV cache holds per request in addition to prompt and output: for a partly filled last
block, which has at most 256 tokens (`flash`), and for draft tokens after the end.
"""


def settings_of(workers: Workers, max_k: int = 1) -> SystemConfig:
    """Return the settings of a system whose workers have the settings `workers` and run as plain processes, without
    Ray. max_k: largest K that requests will have.
    """
    gateway = {"port": 0, "grpc_port": 0, "max_draft_tokens": max_draft_tokens(max_k)}
    return merge_settings({}, {**workers, "gateway": gateway, "ray": {"address": None}}, no_draft=False, no_ray=True)


def with_cache(workers: Workers, prompts: Sequence[str], max_tokens: int, num_at_once: int) -> Workers:
    """Return the workers' settings with KV caches just large enough for `num_at_once` concurrent requests with these
    prompts. max_tokens: maximum number of output tokens of a request.

    Without this, if both workers are on one GPU, the worker that loads first takes most of the memory for its cache.
    """
    max_prompt_tokens = max(map(len, map(str.encode, prompts)))  # a token has one byte of UTF-8 at least
    num_tokens = num_at_once * (max_prompt_tokens + max_tokens + _SPARE_TOKENS)
    return {role: {**settings, "kv_cache_tokens": str(num_tokens)} for role, settings in workers.items()}


def deployments_of(workers: Workers) -> dict[str, Workers]:
    """Return the workers' settings for the two placements of a pair, by name. SPLIT has the workers on two devices, as
    `outrider up` places them. COLOCATED has both on the target's device.

    Raises ConfigError if `outrider up` would place both workers on the same device.
    """
    pools = dict[str, Pool]()
    for pool in settings_of(workers).pools:
        pools[pool.role] = pool
    cores = own_cores(pools)
    shared = _places(pools["target"], cores["target"]) & _places(pools["draft"], cores["draft"])
    if shared:
        raise ConfigError(
            f"the pair is to be on one device and on two, and both would be on {' and '.join(sorted(shared))}: "
            "say --target-cores and --draft-cores, or --target-device cuda:0 and --draft-device cuda:1"
        )
    target = {**workers["target"], "cpu_cores": cores["target"]}
    draft = {**workers["draft"], "cpu_cores": cores["target"], "device": workers["target"]["device"]}
    return {SPLIT: workers, COLOCATED: {"target": target, "draft": draft}}


def _places(pool: Pool, cores: str | None) -> set[str]:
    # cores "0,2-3": {"0", "2", "3"}; no cores on a GPU: {"cuda:0"}
    if cores is not None:
        return set(map(str, parse_cores(cores)))
    if pool.worker.device in ("auto", "cuda"):
        return {"cuda:0"}
    return {pool.worker.device}


@contextmanager
def serving(
    workers: Workers, stop: StopFlag, notes: Console, *, max_k: int = 1, verbose: bool = False
) -> Iterator[Endpoints]:
    """Context manager: start a pair and its gateway, yield their addresses, and stop them after the block.

    stop: flag that ends the start; a StopRequested is then raised. notes: console on which the progress is shown.
    max_k: largest K that requests will have. verbose: whether the processes' logs are shown. Raises OutriderError if a
    process fails.
    """
    with Supervisor(settings_of(workers, max_k), stop, log_to(notes, verbose, stop)) as system:
        with StartProgress(notes) as progress:
            endpoints = system.start(progress)
        yield endpoints


async def measure_under_load(load: Load, plan: LadderPlan, notes: Console, stop: StopFlag) -> list[LoadFigures]:
    """Measure a running system at each concurrency of the plan, once with speculation by the gateway's defaults and
    once without. Return the speeds at each concurrency.

    notes: console on which the progress is shown. Raises StopRequested once `stop` is set.
    """
    with StageProgress(notes) as progress:

        def report(stage: str, text: str, done: int, total: int) -> None:
            stop.check()
            progress.show(stage, text, done, total, " s")

        async with load.client() as client:
            return [figures async for figures in climb(client, load, plan, report)]
