"""Each alert raised for real and seen to end: what is done to the system, and how it is undone."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.stack import DEMO_DRAFT, Pools
from tests.watching.load import Load
from tests.watching.prometheus import FOLDER, Prometheus
from tests.watching.system import (
    NUM_USERS,
    Registry,
    clueless_draft,
    with_weights_of,
    write_half_a_key_file,
    write_key_file,
)

RAISED_WITHIN_S, ENDED_WITHIN_S = 60.0, 90.0
SPARED_S = 15.0
"""For so long after a trouble an alert that it must not raise is looked for; no rule waits longer here."""


@dataclass(frozen=True, slots=True)
class Trouble:
    what: str
    raises: tuple[str, ...]
    do: Callable[[], None]
    undo: Callable[[], None]
    spares: tuple[str, ...] = ()
    """What it must not raise."""


@dataclass(frozen=True, slots=True)
class Seen:
    alert: str
    what: str
    was_calm: bool
    """It did not fire before the trouble began, so that it is the trouble which raised it."""
    raised_s: float | None
    """From the trouble's beginning; None = it was not raised in time."""
    ended_s: float | None
    """From the trouble's end."""

    @property
    def well(self) -> bool:
        return self.was_calm and self.raised_s is not None and self.ended_s is not None


def troubles(pools: Pools, registry: Registry, load: Load, folder: Path) -> list[Trouble]:
    def kill(members: list[int], of: str) -> Callable[[], None]:
        return lambda: [getattr(pools, of)[index].popen.kill() for index in members] and None

    def start(members: list[int], of: str) -> Callable[[], None]:
        return lambda: [pools.restart(getattr(pools, of)[index]) for index in members] and None

    def stop(signal_number: int) -> Callable[[], None]:
        return lambda: pools.targets[0].popen.send_signal(signal_number)

    def users(level: int, *, long: bool = False) -> Callable[[], None]:
        def change() -> None:
            load.level, load.long = level, long

        return change

    def crowd() -> None:
        """One more every half second: the queue grows, and does not jump."""
        for _ in range(30):
            load.level += 1
            time.sleep(0.5)

    usual = users(NUM_USERS)
    clueless = clueless_draft(folder / "clueless")
    return [
        Trouble("one of two targets killed", ("OutriderTargetLost",), kill([0], "targets"), start([0], "targets")),
        Trouble("one of two targets hangs", ("OutriderTargetLost",), stop(signal.SIGSTOP), stop(signal.SIGCONT)),
        Trouble(
            "one of two targets drained",
            (),
            stop(signal.SIGTERM),
            start([0], "targets"),
            spares=("OutriderTargetLost", "OutriderNoTarget"),
        ),
        Trouble("both targets killed", ("OutriderNoTarget",), kill([0, 1], "targets"), start([0, 1], "targets")),
        Trouble(
            "both drafts killed",
            ("OutriderDraftsGone", "OutriderPlainStepsHigh"),
            kill([0, 1], "drafts"),
            start([0, 1], "drafts"),
        ),
        Trouble(
            "drafts of random weights",
            ("OutriderAcceptanceCollapse", "OutriderAcceptanceDrift"),
            lambda: with_weights_of(pools, folder, clueless),
            lambda: with_weights_of(pools, folder, Path(DEMO_DRAFT)),
        ),
        Trouble("long prompts of many", ("OutriderKVCacheNearlyFull",), users(14, long=True), usual),
        Trouble("users come and come", ("OutriderQueueGrowing",), crowd, usual),
        Trouble("more users than places", ("OutriderRequestsRefused",), users(60), usual),
        Trouble(
            "a file of API keys that breaks",
            ("OutriderKeysOutdated",),
            lambda: write_half_a_key_file(folder),
            lambda: write_key_file(folder),
        ),
        Trouble(
            "the registry killed",
            ("OutriderRegistryLost",),
            registry.kill,
            registry.start,
            spares=("OutriderTargetLost", "OutriderNoTarget", "OutriderDraftsGone"),
        ),
        Trouble("the gateway killed", ("OutriderGatewayDown",), kill([0], "gateways"), start([0], "gateways")),
    ]


def all_alerts() -> set[str]:
    rules = yaml.safe_load((FOLDER / "rules/alerts.yml").read_text())
    return {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def provoke(trouble: Trouble, prometheus: Prometheus) -> tuple[list[Seen], set[str]]:
    """What its alerts did, and which fired that it must spare. It is undone whether it raised its alerts or not."""
    calm = _watch(prometheus, set(trouble.raises + trouble.spares), time.monotonic(), ENDED_WITHIN_S, firing=False)
    began_s = time.monotonic()
    trouble.do()
    raised = _watch(prometheus, set(trouble.raises), began_s, RAISED_WITHIN_S, firing=True)
    unspared = _watch(prometheus, set(trouble.spares), began_s, SPARED_S, firing=True)
    undone_s = time.monotonic()
    trouble.undo()
    ended = _watch(prometheus, set(raised), undone_s, ENDED_WITHIN_S, firing=False)
    seen = [Seen(alert, trouble.what, alert in calm, raised.get(alert), ended.get(alert)) for alert in trouble.raises]
    return seen, set(unspared)


def _watch(
    prometheus: Prometheus, alerts: set[str], since_s: float, within_s: float, *, firing: bool
) -> dict[str, float]:
    """When each came to fire, or to fire no more; without those that did not in time."""
    seen: dict[str, float] = {}
    while alerts - seen.keys() and time.monotonic() - since_s < within_s:
        now_s = time.monotonic() - since_s
        fire = prometheus.firing()
        seen |= {alert: now_s for alert in alerts - seen.keys() if (alert in fire) is firing}
        time.sleep(0.5)
    return seen
