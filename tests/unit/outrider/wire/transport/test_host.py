"""Cores of a process: which it is pinned to, and their parts."""

import os
import subprocess
import sys

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.transport.host import new_epoch, pin_process, split_evenly

_PINS = """
import os, sys, threading
from outrider.wire.transport.host import pin_process
seen, go = [], threading.Event()
older = threading.Thread(target=lambda: (go.wait(), seen.append(os.sched_getaffinity(0))))
older.start()
core = int(sys.argv[1])
assert pin_process(str(core)) == {core}
go.set()
older.join()
assert seen == [{core}] and os.environ["OMP_NUM_THREADS"] == "1"
"""


def test_threads_that_run_already_are_pinned_too() -> None:
    core = min(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", _PINS, str(core)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_the_setting_nothing_changes_and_other_machines_cores_are_refused() -> None:
    allowed = os.sched_getaffinity(0)
    assert pin_process(None) == allowed
    num_cores = os.cpu_count() or 1
    with pytest.raises(ConfigError, match=f"cpu_cores is '{num_cores}', this machine has cores 0 to {num_cores - 1}"):
        pin_process(str(num_cores))
    assert os.sched_getaffinity(0) == allowed


def test_parts_are_neighbours_and_as_even_as_can_be() -> None:
    assert split_evenly([4, 0, 2, 1, 3], 2) == [{0, 1}, {2, 3, 4}]
    assert split_evenly(range(6), 3) == [{0, 1}, {2, 3}, {4, 5}]
    assert split_evenly([7, 8], 3) == [{7, 8}] * 3, "too few: each has all"


def test_an_epoch_is_64_bits_and_never_0() -> None:
    epochs = {new_epoch() for _ in range(100)}
    assert len(epochs) == 100 and all(0 < epoch < 2**64 for epoch in epochs)
