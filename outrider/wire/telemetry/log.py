"""One log on stderr, as text or as JSON. Prompts and outputs are never logged, at any level.

A log that nobody reads never stops a process: what cannot be written is dropped, counted, and said in a line later.

An exception is logged by its type and the places it passed: its message may quote what a user sent. Only what the
machine itself raised (memory, files, torch) keeps its message, and in workers, which see no text, a RuntimeError, too.
"""

from __future__ import annotations

import contextvars
import faulthandler
import fcntl
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from outrider.wire.peer_text import one_line
from outrider.wire.telemetry.log_writer import LogWriter

LogFormat = Literal["text", "json"]
Fields = Mapping[str, str | int | float | None]

GATEWAY = "gateway"
"""Name of the process that sees text."""
PIPE_BYTES = 1 << 20
"""Bytes of the pipe that stderr is read from, the most that a process without privileges may ask for."""
LINE_START = '{"time": "'
"""Start of a line of JSON that we wrote."""
_OF_THE_MACHINE = (OSError, MemoryError, ImportError)
_writer: LogWriter | None = None
_fields: contextvars.ContextVar[Fields] = contextvars.ContextVar("fields", default=MappingProxyType({}))


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def about(**fields: str | int | float | None) -> dict[str, Fields]:
    """Return `extra=` of a log call: what the line is about, such as slot or member. JSON shows it, text does not."""
    return {"fields": fields}


@contextmanager
def log_fields(**fields: str | int | float | None) -> Iterator[None]:
    """Add these fields to every line that is logged in this block, and by tasks begun in it."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def configure_logging(level: str, process: str, log_format: LogFormat = "text") -> None:
    """Configure the root logger. `process` names the part ("draft", "target", "gateway") in every line."""
    writer = _get_writer()
    formatter: logging.Formatter
    if log_format == "json":
        _take_over_stderr(writer)
        formatter = JsonFormatter(process)
    else:
        formatter = TextFormatter(process)
    handler = _WriterHandler(writer)
    handler.setFormatter(formatter)
    writer.format_dropped = lambda num_dropped: formatter.format(_dropped(num_dropped)) + "\n"
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one INFO line a request otherwise
    logging.getLogger("grpc._cython").setLevel(logging.INFO)  # DEBUG has a line for every stream
    for noisy in ("torchao", "torch.utils._pytree"):  # they warn on import of kernels for other machines
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if log_format == "json":
        adopt_loggers()
        _log_what_python_says()


def adopt_loggers() -> None:
    """Make libraries that brought handlers of their own log through ours. Call after importing them.

    Changes nothing when the log is text.
    """
    if not _is_json():
        return
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers[:] = []
            logger.propagate = True


def tell_end(process: str, message: str) -> None:
    """Log why a process ends, as its last line: for people, who need no time and no level."""
    if _is_json():
        get_logger(process).critical("%s", message)
    elif _writer is None:
        sys.stderr.write(f"{process}: {one_line(message)}\n")
    else:
        _writer.put(f"{process}: {one_line(message)}\n", is_last_word=True)


def num_dropped_lines() -> int:
    """Return how many lines of this process's log were dropped, because nobody read them in time or a disk was full."""
    return 0 if _writer is None else _writer.num_dropped


def describe(error: BaseException, *, in_worker: bool = False) -> str:
    """Return type and places of an exception and of what caused it, the cause first."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = "" if cause is None else describe(cause, in_worker=in_worker) + "\nand then:\n"
    places = "".join(traceback.format_tb(error.__traceback__))
    kind = type(error)
    is_plain = isinstance(error, _OF_THE_MACHINE) or kind.__module__.startswith("torch")
    is_plain = is_plain or (in_worker and kind is RuntimeError)  # what torch raises for most of its own
    if not is_plain:
        return f"{before}{places}{kind.__name__}"
    message = "\n  ".join(one_line(line) for line in str(error).split("\n"))  # no line of it passes for a record
    return f"{before}{places}{kind.__name__}: {message}"


class TextFormatter(logging.Formatter):
    """Formats a record for people: one line, control characters escaped, then the places of an exception."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")
        self._in_worker = process != GATEWAY

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # kept by another formatter, which may have written what users sent
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is of logging
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the name is of logging
        return "" if ei[1] is None else describe(ei[1], in_worker=self._in_worker)


class JsonFormatter(logging.Formatter):
    """Formats an object a line: time (RFC 3339, UTC), level, process, pid, logger, message, and its fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        known: Fields = {**_fields.get(), **getattr(record, "fields", {})}
        line |= {name: value for name, value in known.items() if value is not None}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = describe(record.exc_info[1], in_worker=self._process != GATEWAY)
        return json.dumps(line, default=repr).replace("\x7f", "\\u007f")  # the one control character that json leaves


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class _WriterHandler(logging.Handler):
    """Formats records where they are made and hands the lines to the writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record) + "\n", is_last_word=record.levelno >= logging.CRITICAL)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._writer.flush()


def _get_writer() -> LogWriter:
    """Return the process's writer, which is started once."""
    global _writer
    if _writer is None:
        _writer = stderr_writer(lambda num_dropped: f"{_dropped(num_dropped).getMessage()}\n")
    return _writer


def stderr_writer(format_dropped: Callable[[int], str]) -> LogWriter:
    """Return a writer to what is stderr now. What others write to stderr meanwhile cannot be held up either."""
    others = [2]
    with suppress(OSError):  # stdout is closed
        if os.path.sameopenfile(1, 2):
            others.append(1)
    return LogWriter(os.dup(2), format_dropped, others)


def _dropped(num_dropped: int) -> logging.LogRecord:
    message = "%d lines of the log were dropped here: they were not read in time, or their disk is full"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (num_dropped,), None)


def _take_over_stderr(writer: LogWriter) -> None:
    """Keep stderr for the log alone.

    What others write to stderr (C libraries, child processes) becomes lines of the log; only a crash of the interpreter
    is written as it is.
    """
    crashes = os.dup(2)
    read_end, write_end = os.pipe()
    with suppress(OSError):  # C code that holds the interpreter's lock writes while nobody can read
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.dup2(write_end, 2)
    os.close(write_end)
    writer.others = [crashes, *(other for other in writer.others if other != 2)]
    logging.raiseExceptions = False  # a line that cannot be written would be reported on stderr, and so logged again
    faulthandler.enable(file=crashes)
    log = get_logger("stderr")

    def pass_on() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(LINE_START):  # a child process that logs as we do wrote it
                    writer.put(line)
                elif line.strip():
                    log.warning("%s", line.rstrip())

    threading.Thread(target=pass_on, name="stderr", daemon=True).start()


def _log_what_python_says() -> None:
    """Log warnings, and exceptions that nobody caught."""
    logging.captureWarnings(True)
    log = get_logger("python")

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.critical("a thread ended", exc_info=args.exc_value)

    sys.excepthook = lambda _kind, error, _places: log.critical("the process ends", exc_info=error)
    threading.excepthook = of_thread
