"""`make dashboards-check`: starts the system, a Prometheus and users; raises every alert; asks every query; draws.

Takes about five minutes and exits 1 on whatever was not as it should be.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from deploy.prometheus.binaries import NotFound
from tests.forked import REPO
from tests.watching.alerts import Seen, all_alerts, provoke, troubles
from tests.watching.dashboards import FILES
from tests.watching.dashboards import faults as dashboard_faults
from tests.watching.load import DEFAULTS, WISHES, Load
from tests.watching.panels import Answered, answers
from tests.watching.picture import draw
from tests.watching.prometheus import Prometheus
from tests.watching.system import NUM_CLIENTS, NUM_USERS, watched

PICTURE = REPO / "docs/images/overview.png"
HEALTHY_S = 45.0
"""Two clients under the gateway's default: three times what a rule waits for here, a span of 10 s and 3 s."""
CALM_S = 30.0
"""The usual load before the first trouble."""
PLAIN_SHARES = (
    "sum by (reason) (rate(spec_plain_steps_total[30s])) "
    "/ scalar(sum(rate(spec_plain_steps_total[30s])) + sum(rate(spec_rounds_total[30s])))"
)
"""Of the target's passes, by why they were plain."""


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            faults = _run(folder, options)
        except NotFound as error:
            faults = [str(error)]
        except BaseException:
            for log in sorted(folder.glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
            raise
    faults += [f"{path.name}: {fault}" for path in FILES for fault in dashboard_faults(path)]
    for fault in faults:
        print(f"FAULT {fault}")
    print("dashboards-check:", f"{len(faults)} faults" if faults else "all well")
    return bool(faults)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make dashboards-check", description=__doc__)
    parser.add_argument("--only", help="raise only alerts whose name contains this, and draw nothing")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"where to draw (default {PICTURE})")
    return parser.parse_args()


def _run(folder: Path, options: argparse.Namespace) -> list[str]:
    with (
        watched(folder) as (pools, registry),
        closing(Prometheus(folder, pools.http().removeprefix("http://"))) as prometheus,
        closing(Load(pools.grpc(), NUM_CLIENTS, DEFAULTS)) as load,
    ):
        faults = _wait_scraped(prometheus, 5)
        began_s = time.time()
        time.sleep(HEALTHY_S)
        healthy = prometheus.fired(began_s, time.time())
        faults += [f"{alert} fires on a healthy system" for alert in sorted(healthy)]
        faults += _passes_plain(prometheus)
        load.wishes, load.level = WISHES, NUM_USERS
        time.sleep(CALM_S)
        fired = prometheus.firing()
        faults += [f"{alert} fires though nothing is wrong" for alert in sorted(fired)]
        seen: list[Seen] = []
        spared: dict[str, list[str]] = defaultdict(list)
        for trouble in troubles(pools, registry, load, folder):
            concerned = trouble.raises + trouble.spares
            if options.only is None or any(options.only in alert for alert in concerned):
                found, unspared = provoke(trouble, prometheus)
                seen += _reported(found)
                faults += [f"{alert} was raised by: {trouble.what}" for alert in sorted(unspared)]
                for alert in set(trouble.spares) - unspared:
                    spared[alert].append(trouble.what)
        _alert_table(seen, healthy, spared)
        faults += [
            f"{each.alert} was not raised and ended by: {each.what}{'' if each.was_calm else '; it fired before'}"
            for each in seen
            if not each.well
        ]
        if options.only is not None:
            return faults
        faults += [f"no trouble raises {alert}" for alert in sorted(all_alerts() - {each.alert for each in seen})]
        answered = answers(prometheus, began_s, time.time())
        _table(answered)
        faults += [
            f"{each.asked.dashboard}, {each.asked.title}: {each.fault} for {each.asked.expr}"
            for each in answered
            if not each.well
        ]
        draw(prometheus, began_s, time.time(), options.picture)
        print(f"{options.picture}: {options.picture.stat().st_size / 1000:.0f} kB; users' requests: {dict(load.ended)}")
    return faults


def _wait_scraped(prometheus: Prometheus, num_parts: int) -> list[str]:
    """Until every part answers Prometheus, and nothing fires any more for what was not read yet when it began."""
    until = time.monotonic() + 30
    while len(scraped := prometheus.scraped()) < num_parts and time.monotonic() < until:
        time.sleep(0.5)
    while prometheus.firing() and time.monotonic() < until:
        time.sleep(0.5)
    for url, labels in sorted(scraped.items(), key=lambda item: sorted(item[1].items())):
        print(f"scraped {url} {labels}")
    return [] if len(scraped) == num_parts else [f"{len(scraped)} of {num_parts} parts are scraped"]


def _reported(seen: list[Seen]) -> list[Seen]:
    for each in seen:
        raised, ended = (_seconds(value) for value in (each.raised_s, each.ended_s))
        print(f"{each.alert:28} {each.what:28} raised after {raised:>6}, ended after {ended:>6}", flush=True)
    return seen


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _passes_plain(prometheus: Prometheus) -> list[str]:
    """Print why passes were plain; return a fault where drafts pay: the default is to be tried where they do not."""
    shares = {line.labels["reason"]: line.values[-1] for line in prometheus.now(PLAIN_SHARES)}
    told = ", ".join(f"{reason} {share:.1%}" for reason, share in sorted(shares.items()) if share)
    print(f"{NUM_CLIENTS} clients under auto, {HEALTHY_S:.0f} s; of the passes plain: {told}", flush=True)
    if shares["does_not_pay"] > 0.5:
        return []
    return ["drafts pay on this machine, so that the default was not tried with drafts that do not"]


def _alert_table(seen: list[Seen], healthy: set[str], spared: Mapping[str, Sequence[str]]) -> None:
    print(f"{'alert':28} {'fired by':30} {'after':>7} {'ended':>7}  {'healthy default':15}  not fired by")
    for each in seen:
        after, ended = _seconds(each.raised_s), _seconds(each.ended_s)
        on_healthy = "fired" if each.alert in healthy else "not fired"
        print(f"{each.alert:28} {each.what:30} {after:>7} {ended:>7}  {on_healthy:15}  {', '.join(spared[each.alert])}")


def _table(answered: list[Answered]) -> None:
    print(f"{'dashboard':10} {'panel':34} {'series':>6} {'moving':>6} {'samples':>8}")
    for each in answered:
        counts = f"{each.num_series:6} {each.num_moving:6} {each.num_samples:8}"
        print(f"{each.asked.dashboard:10} {each.asked.title:34} {counts}  {each.fault or ''}")


if __name__ == "__main__":
    sys.exit(main())
