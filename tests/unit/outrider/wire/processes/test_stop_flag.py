"""The flag that signals set: what ends a wait for it, whenever they come."""

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time

from outrider.wire.processes.stop_flag import StopFlag, stop_signals

HUNG_AFTER_S = 30.0
_WAITS_FOR_SIGNALS = """
import os, sys
from outrider.wire.processes.stop_flag import StopFlag
for number in range(int(sys.argv[1])):
    stop = StopFlag()
    with stop.installed():
        os.write(1, b".")
        if number % 2:
            stop.wait()
        while not stop.wait(0):
            pass
"""
"""Takes as many signals: blocked for every other one, and in a tight loop of looks at the flag for the rest."""


def test_of_2000_signals_at_random_moments_none_leaves_a_process_waiting() -> None:
    """With a flag whose handler takes a lock most such processes hang before the hundredth."""
    moments = random.Random(0)
    command = [sys.executable, "-c", _WAITS_FOR_SIGNALS, "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        try:
            for number in range(2000):
                readable, _, _ = select.select([waiting.stdout], [], [], HUNG_AFTER_S)
                assert readable, f"it hangs after {number} signals"
                assert os.read(waiting.stdout.fileno(), 1) == b"."
                spin_until_s = time.perf_counter() + moments.uniform(0.0, 1e-4)
                while time.perf_counter() < spin_until_s:
                    pass
                waiting.send_signal(moments.choice([signal.SIGINT, signal.SIGTERM]))
            assert waiting.wait(HUNG_AFTER_S) == 0
        finally:
            waiting.kill()


def test_what_ends_a_wait() -> None:
    stop = StopFlag()
    assert not stop.wait(0.01)
    threading.Timer(0.01, stop.notify).start()
    assert not stop.wait(HUNG_AFTER_S) and not stop.is_set()
    threading.Timer(0.01, stop.set).start()
    others = [threading.Thread(target=stop.wait) for _ in range(3)]
    for other in others:
        other.start()
    while not stop.wait(HUNG_AFTER_S):
        pass
    for other in others:
        other.join(HUNG_AFTER_S)
        assert not other.is_alive(), "the flag is for all who wait"
    assert stop.wait() and not stop.is_hurried


def test_a_hangup_that_nohup_had_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_wait_ends_by_a_signal_after_an_event_loop_has_taken_signals_for_itself() -> None:
    stop = StopFlag()
    with stop.installed():

        async def watch_signals() -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)

        asyncio.run(watch_signals())
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        while not stop.wait():
            pass
        assert not stop.is_hurried
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait() and stop.is_hurried
