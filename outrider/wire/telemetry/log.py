"""The log of every process, on stderr, as text or as JSON. Prompts and outputs are never logged, at any level.

A process never blocks because its log is not read: lines that cannot be written are dropped and counted, and a later
line has their number.

An exception is logged with its type and traceback, but without its message, which may quote what a user sent. Two kinds
keep their message: exceptions of the machine (memory, files, imports), and RuntimeErrors in workers, which see no text.
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
"""Name of the gateway's process in logs. Only this process sees users' text, while workers see token ids."""
PIPE_BYTES = 1 << 20
"""Size in bytes of the pipe through which this process reads what C libraries write to stderr: the maximum for a
process without privileges on Linux."""
LINE_START = '{"time": "'
"""Text at the start of every line that JsonFormatter makes."""
_MACHINE_ERRORS = (OSError, MemoryError, ImportError)
"""Classes of exceptions whose messages are logged, since they quote nothing that a user sent."""
_writer: LogWriter | None = None
"""The writer of this process's log; None = logging is not configured yet."""
_fields: contextvars.ContextVar[Fields] = contextvars.ContextVar("fields", default=MappingProxyType({}))
"""Fields that the enclosing `log_fields` blocks add to log lines."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger for a module. name: the module's `__name__`."""
    return logging.getLogger(name)


def log_extra(**fields: str | int | float | None) -> dict[str, Fields]:
    """Return the argument `extra` for a log call, which adds fields such as slot or member to the line. They appear in
    JSON lines only, not in text lines.
    """
    return {"fields": fields}


@contextmanager
def log_fields(**fields: str | int | float | None) -> Iterator[None]:
    """Context manager: add fields to every line that is logged in the block, and to every line of the tasks that the
    block starts. JSON lines show the fields; text lines do not.
    """
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def configure_logging(level: str, process: str, log_format: LogFormat = "text") -> None:
    """Configure the root logger to write to stderr. level: the lowest level that is logged. process: name of this
    process ("draft", "target" or "gateway"), which every line shows. log_format: whether a line is text or a JSON
    object.
    """
    writer = _get_writer()
    formatter: logging.Formatter
    if log_format == "json":
        _redirect_stderr(writer)
        formatter = JsonFormatter(process)
    else:
        formatter = TextFormatter(process)
    handler = _WriterHandler(writer)
    handler.setFormatter(formatter)
    writer.format_dropped = lambda num_dropped: formatter.format(_dropped(num_dropped)) + "\n"
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)  # INFO has a line for every request
    logging.getLogger("grpc._cython").setLevel(logging.INFO)  # DEBUG has a line for every stream
    for noisy in ("torchao", "torch.utils._pytree"):  # their import warns of kernels for other machines
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if log_format == "json":
        adopt_loggers()
        _log_uncaught_exceptions()


def adopt_loggers() -> None:
    """Remove the log handlers that libraries have installed, so that their lines go to this process's handler. Call it
    after importing those libraries. Does nothing if the log's format is text.
    """
    if not _is_json():
        return
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers[:] = []
            logger.propagate = True


def log_end(process: str, message: str) -> None:
    """Log why this process ends, as the last line of its log. In the text format that line has no time and no level."""
    if _is_json():
        get_logger(process).critical("%s", message)
    elif _writer is None:
        sys.stderr.write(f"{process}: {one_line(message)}\n")
    else:
        _writer.put(f"{process}: {one_line(message)}\n", is_last_word=True)


def num_dropped_lines() -> int:
    """Return the number of lines of this process's log that were dropped, because the log was not read in time or its
    disk was full.
    """
    if _writer is None:
        return 0
    return _writer.num_dropped


def describe(error: BaseException, *, in_worker: bool = False) -> str:
    """Return a text with the type and traceback of an exception, after the same text about each exception that caused
    it. The message of an exception is included only if exceptions of its class never quote what a user sent.

    in_worker: whether this process is a worker. Messages of RuntimeErrors are then included too, since no user's text
    reaches a worker.
    """
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    before = ""
    if cause is not None:
        before = describe(cause, in_worker=in_worker) + "\nand then:\n"
    places = "".join(traceback.format_tb(error.__traceback__))
    kind = type(error)
    has_safe_message = (
        isinstance(error, _MACHINE_ERRORS)
        or kind.__module__.startswith("torch")
        or (in_worker and kind is RuntimeError)  # most of torch's own errors
    )
    if not has_safe_message:
        return f"{before}{places}{kind.__name__}"
    message = "\n  ".join(map(one_line, str(error).split("\n")))  # indented, so that no line looks like a record
    return f"{before}{places}{kind.__name__}: {message}"


class TextFormatter(logging.Formatter):
    """Formats a log record as one line of text with control characters escaped, then the traceback of its exception, if
    it has one.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")
        self._in_worker = process != GATEWAY

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # cached by another formatter, and may quote what users sent
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is of logging
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the name is of logging
        if ei[1] is None:
            return ""
        return describe(ei[1], in_worker=self._in_worker)


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object on one line. The object has time (RFC 3339, UTC), level, process, pid,
    logger, message and the fields of `log_fields` and `log_extra`.
    """

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
        fields: Fields = {**_fields.get(), **getattr(record, "fields", {})}
        line |= {name: value for name, value in fields.items() if value is not None}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = describe(record.exc_info[1], in_worker=self._process != GATEWAY)
        return json.dumps(line, default=repr).replace("\x7f", "\\u007f")  # the only control character that json leaves


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class _WriterHandler(logging.Handler):
    # Formats a record on the thread that logs it, and queues the line at the writer.

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

    global _writer
    if _writer is None:
        _writer = stderr_writer(lambda num_dropped: f"{_dropped(num_dropped).getMessage()}\n")
    return _writer


def stderr_writer(format_dropped: Callable[[int], str]) -> LogWriter:
    """Return a writer for the file that stderr currently leads to. While that file accepts no data, the writer leads
    stderr to /dev/null, so that C libraries that write to stderr do not block.

    format_dropped: returns the log line that reports a given number of dropped lines.
    """
    others = [2]
    with suppress(OSError):  # stdout is closed
        if os.path.sameopenfile(1, 2):
            others.append(1)
    return LogWriter(os.dup(2), format_dropped, others)


def _dropped(num_dropped: int) -> logging.LogRecord:
    message = "%d lines of the log were dropped here: they were not read in time, or their disk is full"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (num_dropped,), None)


def _redirect_stderr(writer: LogWriter) -> None:
    # Text that C libraries and child processes write to stderr becomes lines of the log; only a crash of the
    # interpreter is written as it is.
    crashes = os.dup(2)
    read_end, write_end = os.pipe()
    with suppress(OSError):  # large, for C code that writes while it holds the interpreter's lock: nobody reads then
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.dup2(write_end, 2)
    os.close(write_end)
    writer.other_descriptors = [crashes, *(other for other in writer.other_descriptors if other != 2)]
    logging.raiseExceptions = False  # else a line that cannot be written is reported on stderr, and logged again
    faulthandler.enable(file=crashes)
    log = get_logger("stderr")

    def pass_on() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(LINE_START):  # of a child process with such a log
                    writer.put(line)
                elif line.strip():
                    log.warning("%s", line.rstrip())

    threading.Thread(target=pass_on, name="stderr", daemon=True).start()


def _log_uncaught_exceptions() -> None:
    # Warnings are logged too.
    logging.captureWarnings(True)
    log = get_logger("python")

    def log_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.critical("a thread ended", exc_info=args.exc_value)

    sys.excepthook = lambda _kind, error, _traceback: log.critical("the process ends", exc_info=error)
    threading.excepthook = log_thread
