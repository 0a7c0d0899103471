"""Runs sections one after the other, each in a session of processes that ends with it, whatever it does."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.bench import REPO
from benchmarks.gpu.sections import START_S, Section

LOG_LINES = 60
"""Lines of a section's stderr that are kept."""
TELL_EVERY_S = 1.0
"""Seconds between two writes of the documents while a section runs."""
STACKS_S = 3.0
"""Seconds for a process to write where its threads stand, at most; an idle machine takes 0.1."""
_STACK = "(most recent call first)"
"""Heads what faulthandler writes of a thread."""
ENDED_WITHIN_S = 5.0
"""Seconds for the kernel to end what was killed: a process that uses a GPU gives its memory back first."""
STARTED_AHEAD_CORES = 4
"""Cores from which the next section's imports run beside the present one."""

Write = Callable[[], None]


@dataclass
class Outcome:
    """What became of one section."""

    section: Section
    state: str = "not run"
    """not run, running, ok, findings, crashed, killed, over its limit, needs a card or interrupted."""
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)
    """The last lines of its stderr, kept where it failed."""

    @property
    def summary(self) -> str:
        """Return its one line."""
        for event in reversed(self.events):
            if event["kind"] == "crash":
                return str(event["text"])
        findings = self.findings
        if findings:
            rest = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            return f"{findings[0]}{rest}"
        texts = [event["text"] for event in self.events if event["kind"] == "summary"]
        return str(texts[-1]) if texts else ""

    @property
    def findings(self) -> list[str]:
        return [str(event["text"]) for event in self.events if event["kind"] == "finding"]

    @property
    def is_well(self) -> bool:
        return self.state in ("ok", "needs a card")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.section.name,
            "about": self.section.about,
            "limit_s": self.section.limit_s,
            "seconds": round(self.seconds, 1),
            "state": self.state,
            "summary": self.summary,
            "events": [event for event in self.events if event["kind"] not in ("summary", "folder")],
            "log": self.log,
        }


class Process:
    """A section's process, in a session of its own, that waits until it is told to begin."""

    def __init__(self, section: Section, *, rehearse: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.child", section.path]
        if rehearse:
            command.append("--rehearse")
        if not section.needs_torch:
            command.append("--alone")
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.popen = subprocess.Popen(
            command,
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            _start_reader(self._read_events, self.popen.stdout),
            _start_reader(self.log.extend, self.popen.stderr),
        ]

    def wait_imported(self, limit_s: float) -> None:
        """Return when it has imported torch, has ended, or the time is up: it then imports in its own time."""
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s and self.popen.poll() is None:
            if not self.events.empty():
                self.events.get()
                return
            time.sleep(0.02)

    def begin(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit code says so
            self.popen.stdin.write("begin\n")
            self.popen.stdin.flush()

    def write_stacks(self) -> None:
        """Have it write where its threads stand, into its log."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGUSR1)
        give_up_s = time.monotonic() + STACKS_S
        while time.monotonic() < give_up_s and not any(_STACK in line for line in self.last_lines()):
            time.sleep(0.05)
        time.sleep(0.1)  # for the lines behind the first

    def end(self) -> None:
        """Kill it and every process of its session, and wait until they are gone."""
        give_up_s = time.monotonic() + ENDED_WITHIN_S
        while time.monotonic() < give_up_s:
            members = session_members(self.popen.pid)
            if self.popen.poll() is None:
                members.append(self.popen.pid)
            if not members:
                break
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(1.0)
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def last_lines(self) -> list[str]:
        return [line.rstrip("\n")[:500] for line in self.log]

    def _read_events(self, lines: Iterable[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "kind" in event:
                    self.events.put(event)


def _start_reader(read: Callable[[Any], None], pipe: IO[str] | None) -> threading.Thread:
    thread = threading.Thread(target=read, args=(pipe or (),), daemon=True)
    thread.start()
    return thread


def session_members(session: int) -> list[int]:
    """Return the pids of all processes of a session that have not ended, its leader excepted."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # "pid (name) state ppid pgrp session ...": the name may hold spaces and parentheses
            state, _, _, own_session = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
            pid = int(stat.parent.name)
            if int(own_session) == session and pid != session and state not in "ZX":
                found.append(pid)
    return found


def run_sections(
    outcomes: Sequence[Outcome], *, rehearse: bool, write: Write, say: Callable[[str], None], deadline_s: float
) -> None:
    """Run the sections of `outcomes` in order and fill these in.

    A section that needs less than its limit leaves the rest to the next ones.

    write: called whenever there is something new. say: prints a line. deadline_s: monotonic time at which everything
    ends; sections that have not begun by then are not run. Raises KeyboardInterrupt, with everything ended.
    """
    waiting: dict[str, Process] = {}
    unused_s = 0.0
    ahead = (os.cpu_count() or 1) >= STARTED_AHEAD_CORES
    pending = [each for each in outcomes if not (rehearse and each.section.needs_card)]
    for outcome in outcomes:
        if outcome not in pending:
            outcome.state = "needs a card"
            say(line_of(outcome))

    def start(outcome: Outcome) -> Process:
        return Process(outcome.section, rehearse=rehearse)

    try:
        for index, outcome in enumerate(pending):
            if time.monotonic() >= deadline_s:
                break
            process = waiting.pop(outcome.section.name, None) or start(outcome)
            try:
                if ahead and index + 1 < len(pending):
                    waiting[pending[index + 1].section.name] = start(pending[index + 1])
                limit_s = outcome.section.limit_s + unused_s
                _follow(process, outcome, limit_s, deadline_s, write)
                unused_s = max(0.0, limit_s - outcome.seconds)
            finally:
                process.end()
                _remove_folders(outcome)
            write()
            say(line_of(outcome))
    finally:
        for process in waiting.values():
            process.end()
        write()


def line_of(outcome: Outcome) -> str:
    section = outcome.section
    took = f"{outcome.seconds:.1f} s of {section.limit_s}"
    return f"{section.name:<10} {outcome.state:<14} {took:>14}  {outcome.summary}".rstrip()[:240]


def _follow(process: Process, outcome: Outcome, limit_s: float, deadline_s: float, write: Write) -> None:
    outcome.state = "running"
    process.wait_imported(min(START_S, deadline_s - time.monotonic()))
    began_s = time.monotonic()
    limit_s = min(limit_s, max(0.0, deadline_s - began_s))
    process.begin()
    told_s = 0.0
    try:
        while True:
            elapsed_s = time.monotonic() - began_s
            has_ended = process.popen.poll() is not None
            if has_ended:
                process._readers[0].join(1.0)
            is_new = _take_events(process, outcome)
            outcome.seconds = elapsed_s
            if has_ended or elapsed_s > limit_s:
                break
            if is_new and time.monotonic() - told_s > TELL_EVERY_S:
                write()
                told_s = time.monotonic()
            time.sleep(0.05)
        if process.popen.poll() is None:
            process.write_stacks()
        outcome.state = _state_of(process.popen.poll(), outcome)
    except KeyboardInterrupt:
        outcome.state = "interrupted"
        raise
    finally:
        if not outcome.is_well:
            process.end()
            _take_events(process, outcome)
            outcome.log = process.last_lines()


def _state_of(returncode: int | None, outcome: Outcome) -> str:
    if returncode is None or returncode == -signal.SIGUSR1:  # the kit's own signal, before the section could answer it
        outcome.events.append({"kind": "crash", "text": f"killed at its limit, after {outcome.seconds:.0f} s"})
        return "over its limit"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        why = ", as the kernel does when the host's memory ends" if name == "SIGKILL" else ""
        outcome.events.append({"kind": "crash", "text": f"ended by {name}{why}"})
        return "killed"
    if returncode:
        if not any(event["kind"] == "crash" for event in outcome.events):
            outcome.events.append({"kind": "crash", "text": f"ended with exit code {returncode}"})
        return "crashed"
    return "findings" if outcome.findings else "ok"


def _take_events(process: Process, outcome: Outcome) -> bool:
    """Move what the section has reported to its outcome; return whether there was anything."""
    is_new = False
    while not process.events.empty():
        event = process.events.get()
        if event["kind"] != "imported":  # late
            outcome.events.append(event)
            is_new = True
    return is_new


def _remove_folders(outcome: Outcome) -> None:
    """Remove what a killed section could not: models of up to 18 GB, in memory."""
    parents = {Path(tempfile.gettempdir()), Path("/dev/shm")}
    for event in outcome.events:
        if event["kind"] == "folder" and Path(event["path"]).parent in parents:
            shutil.rmtree(event["path"], ignore_errors=True)
