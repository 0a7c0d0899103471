"""Log lines: JSON that parses whatever is logged, and exceptions that quote nothing."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest

from outrider.wire.telemetry.log import (
    JsonFormatter,
    TextFormatter,
    describe,
    get_logger,
    log_end,
    log_extra,
    log_fields,
)

log = get_logger("tests.log")
SECRET = "what the user wrote"


@pytest.fixture(params=[JsonFormatter, TextFormatter])
def formatter(request: pytest.FixtureRequest) -> logging.Formatter:
    made: logging.Formatter = request.param("gateway")
    return made


@pytest.fixture
def written(formatter: logging.Formatter) -> Iterator[Callable[[], list[str]]]:
    """Lines so far."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log.addHandler(handler)
    log.propagate = False
    yield lambda: stream.getvalue().splitlines()
    log.removeHandler(handler)
    log.propagate = True


only_json = pytest.mark.parametrize("formatter", [JsonFormatter], indirect=True)
both = pytest.mark.parametrize("formatter", [JsonFormatter, TextFormatter], indirect=True)


@only_json
def test_a_line_has_time_process_and_message(written: Callable[[], list[str]]) -> None:
    log.warning("lost %d\nof %s", 3, "five", extra=log_extra(slot=7, member=None))
    line = json.loads(written()[0])
    assert (line["level"], line["process"], line["logger"], line["slot"]) == ("warning", "gateway", "tests.log", 7)
    assert (line["message"], line["pid"]) == ("lost 3\nof five", os.getpid())
    assert "member" not in line
    assert line["time"].endswith("Z")
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    assert len(written()) == 1


@both
def test_a_record_is_one_line_whatever_others_wrote_into_it(written: Callable[[], list[str]]) -> None:
    forged = "x\n2026-11-27 00:00:00,000 ERROR target forged: \r\x1b[31m\x9b\x7f\u2028\u202e"
    log.warning("joined: %s", forged)
    log.warning(forged)
    assert len(written()) == 2
    assert all(line.isprintable() for line in written())
    assert "forged" in written()[0]
    try:
        raise OSError(forged)
    except OSError:
        log.exception("failed")
    assert not any(line.startswith("2026-11-27") or "\x1b" in line for line in written())


@only_json
async def test_lines_of_a_block_and_of_tasks_begun_in_it_are_about_its_fields(written: Callable[[], list[str]]) -> None:
    async def work() -> None:
        log.warning("inside", extra=log_extra(slot=1))

    with log_fields(request_id="req-1"):
        task = asyncio.create_task(work())
    await task
    log.warning("outside")
    inside, outside = map(json.loads, written())
    assert (inside["request_id"], inside["slot"]) == ("req-1", 1)
    assert "request_id" not in outside


@both
def test_an_exception_is_logged_by_its_places_without_quoted_values(written: Callable[[], list[str]]) -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"no {SECRET}") from error
    except ValueError:
        log.exception("request %s failed", "req-1")
    text = "\n".join(written())
    assert SECRET not in text
    assert text.index("KeyError") < text.index("ValueError")
    assert "test_log.py" in text


def test_a_worker_logs_the_lines_of_torch() -> None:
    error = RuntimeError("CUDA out of memory")
    assert describe(error) == "RuntimeError"
    assert describe(error, in_worker=True) == "RuntimeError: CUDA out of memory"
    assert describe(ValueError(SECRET), in_worker=True) == "ValueError"


def test_the_last_line_of_a_process_is_one_whatever_a_file_wrote_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    log_end("target", "model_type is \x1b[31m\nforged")
    assert capsys.readouterr().err == "target: model_type is \\x1b[31m\\nforged\n"


def test_libraries_warnings_and_last_words_are_json_too() -> None:
    program = """
import logging, os, subprocess, sys, threading, time, warnings
own = logging.StreamHandler()
logging.getLogger("library").addHandler(own)
logging.getLogger("library").propagate = False
from outrider.wire.telemetry.log import configure_logging, log_end
configure_logging("info", "draft", "json")
logging.getLogger("library").warning("by a library")
warnings.warn("by Python")
os.write(2, b"by a C library\\n")
subprocess.run(["sh", "-c", 'echo by a child >&2; echo \\'{"time": "now", "message": "by one that logs"}\\' >&2'])
time.sleep(0.5)
def fail(): raise ValueError(sys.argv[1])
thread = threading.Thread(target=fail)
thread.start()
thread.join()
log_end("draft", "cannot listen")
fail()
"""
    ended = subprocess.run([sys.executable, "-c", program, SECRET], capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    messages = [line["message"] for line in lines]
    assert messages[0] == "by a library"
    assert "by Python" in messages[1]
    assert messages[2:5] == ["by a C library", "by a child", "by one that logs"]
    assert messages[5:] == ["a thread ended", "cannot listen", "the process ends"]
    assert SECRET not in ended.stderr
    assert ended.returncode == 1
