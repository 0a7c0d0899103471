"""`make stops`: systems stopped at random moments, of which none may hang or leave anything behind."""

import argparse
import os
import random
import signal
import sys
import time
from dataclasses import dataclass

from outrider.wire.processes.descendants import become_subreaper, descendants
from tests.up_processes import Up

HUNG_AFTER_S = 120.0
"""Seconds after which a system that was told to stop hangs: its parts' grace periods end before."""


@dataclass(frozen=True)
class Stop:
    """How one system ended."""

    with_ray: bool
    was_serving: bool
    number: signal.Signals
    took_s: float
    code: int | None
    """None: it hung."""
    num_left: int
    """Processes that it left behind."""


def stop_one(args: list[str], moment_s: float, number: signal.Signals) -> Stop:
    """Start a system and stop it after `moment_s`, whatever it does then."""
    up = Up(*args)
    time.sleep(moment_s)
    was_serving = up.ready.is_set()
    began_s = time.monotonic()
    code = up.stop(number, HUNG_AFTER_S)
    took_s = time.monotonic() - began_s
    left = descendants(os.getpid())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Stop("--no-ray" not in args, was_serving, number, took_s, code, len(left))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", type=int, default=40)
    parser.add_argument("--ray-every", type=int, default=5, help="every so many-th has Ray")
    parser.add_argument("--most-s", type=float, default=30.0, help="the latest moment, in seconds after the start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    become_subreaper()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    moments = random.Random(options.seed)
    stops: list[Stop] = []
    for index in range(options.systems):
        args = [] if index % options.ray_every == options.ray_every - 1 else ["--no-ray"]
        number = moments.choice([signal.SIGINT, signal.SIGTERM])
        moment_s = moments.uniform(0.2, options.most_s)
        stop = stop_one(args, moment_s, number)
        stops.append(stop)
        print(f"{index + 1:3} {number.name:8} after {moment_s:4.1f} s: {stop}", flush=True)
    hung = [stop for stop in stops if stop.code is None]
    leaving = [stop for stop in stops if stop.num_left]
    print(
        f"{len(stops)} systems, {sum(stop.with_ray for stop in stops)} with Ray, "
        f"{sum(stop.was_serving for stop in stops)} serving: {len(hung)} hung, {len(leaving)} left processes behind; "
        f"the longest stop took {max(stop.took_s for stop in stops):.1f} s, load average {os.getloadavg()[0]:.1f}"
    )
    return 1 if hung or leaving else 0


if __name__ == "__main__":
    sys.exit(main())
