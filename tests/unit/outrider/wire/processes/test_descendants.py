"""Descendants of a process are found, and ended, orphans too."""

import os
import subprocess
import sys

from outrider.wire.processes.descendants import descendants

_SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
_HAS_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen({_SLEEPS!r})
print(child.pid, flush=True)
child.wait()
"""
_ENDS_ALL = f"""
import subprocess, sys
from outrider.wire.processes.descendants import become_subreaper, descendants, end_descendants
import os
become_subreaper()
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
leaves = "import subprocess; print(subprocess.Popen({_SLEEPS!r}).pid, flush=True)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
gone = subprocess.Popen([sys.executable, "-c", leaves], stdout=subprocess.PIPE, text=True)
orphan = int(gone.stdout.readline())
gone.wait()
ended = end_descendants(0.2)
assert set(ended) == {{child.pid, orphan}}, (ended, child.pid, orphan)
assert descendants(os.getpid()) == []
"""
"""One child ignores SIGTERM; another has ended and left a process behind."""


def test_children_come_before_grandchildren_and_the_dead_are_left_out() -> None:
    before = set(descendants(os.getpid()))
    with subprocess.Popen([sys.executable, "-c", _HAS_A_CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            found = [pid for pid in descendants(os.getpid()) if pid not in before]
            assert found == [child.pid, grandchild] and descendants(child.pid) == [grandchild]
        finally:
            os.kill(grandchild, 9)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert dead.pid not in descendants(os.getpid())


def test_processes_that_ignore_sigterm_and_orphans_are_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS_ALL], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
