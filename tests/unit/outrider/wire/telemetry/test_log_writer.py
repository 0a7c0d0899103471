"""A log that nobody reads."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

UNREAD = """
import os, stat, sys, time
from outrider.wire.telemetry import log_writer
log_writer.FLUSH_S = 0.1
log_writer.MAX_WAITING_LINES = 100
if sys.argv[1] == "console":
    from outrider.cli.console import serving_console
    write = serving_console().print
else:
    from outrider.wire.telemetry.log import configure_logging, get_logger, num_dropped_lines, log_end
    configure_logging("info", "gateway", sys.argv[1])
    write = get_logger("test").info
for number in range(400):
    write(f"line {number} of many that nobody reads" + "." * 1000)
while sys.argv[1] != "json" and stat.S_ISFIFO(os.fstat(2).st_mode):
    time.sleep(0.01)  # until the pipe is full
os.write(2, (b"by a C library" * 100 + b"\\n") * 100)
sys.stderr.write(("by Python" * 100 + "\\n") * 100)
print("goes on", flush=True)
sys.stdin.readline()
for number in range(400):
    write(f"line {number} of many that nobody reads" + "." * 1000)
if sys.argv[1] != "console":
    print(num_dropped_lines() > 100, flush=True)
    log_end("gateway", "over")
"""


@pytest.mark.parametrize("written_to", ["text", "json", "console"])
def test_a_log_without_a_reader_stops_nothing(written_to: str) -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD, written_to],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=write_end,
        text=True,
    )
    os.close(write_end)
    with process, open(read_end) as log_file:
        assert process.stdout is not None
        assert process.stdout.readline() == "goes on\n"
        lines = _until(log_file, "were dropped here")
        assert "line 0 " in lines[0]
        assert len(lines) >= 100, "what fits waits for its reader"
        counts, _ = process.communicate("go on\n", timeout=30)
        assert process.returncode == 0
        assert counts == ("" if written_to == "console" else "True\n")


def _until(lines: Iterator[str], last: str) -> list[str]:
    """Return the lines up to the first that contains `last`."""
    found = list[str]()
    for line in lines:
        found.append(line)
        if last in line:
            return found
    raise AssertionError(f"no line has {last!r}; the last is {found[-1:]}")
