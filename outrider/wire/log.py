"""One log on stderr, as text or as JSON. Prompts and outputs are never logged, at any level.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO

from outrider.wire.peer_text import one_line

LogFormat = Literal["text", "json"]
Fields = Mapping[str, str | int | float | None]

GATEWAY = "gateway"
"""Name of the process that sees text."""
PIPE_BYTES = 1 << 20
"""Bytes of the pipe that stderr is read from, the most that a process without privileges may ask for."""
LINE_START = '{"time": "'
"""Start of a line of JSON that we wrote."""
_OF_THE_MACHINE = (OSError, MemoryError, ImportError)
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
    handler: logging.Handler
    if log_format == "json":
        handler = logging.StreamHandler(_take_over_stderr())
        handler.setFormatter(JsonFormatter(process))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextFormatter(process))
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
    else:
        sys.stderr.write(f"{process}: {one_line(message)}\n")


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


def _take_over_stderr() -> TextIO:
    """Return the stream that was stderr, for the log alone.

    What others write to stderr (C libraries, child processes) becomes lines of the log; only a crash of the interpreter
    is written as it is.
    """
    stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
    read_end, write_end = os.pipe()
    with suppress(OSError):  # C code that holds the interpreter's lock writes while nobody can read
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.dup2(write_end, 2)
    os.close(write_end)
    logging.raiseExceptions = False  # a line that cannot be written would be reported on stderr, and so logged again
    faulthandler.enable(file=stderr)
    log = get_logger("stderr")

    def pass_on() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(LINE_START):  # a child process that logs as we do wrote it
                    with suppress(OSError):
                        stderr.write(line)
                elif line.strip():
                    log.warning("%s", line.rstrip())

    threading.Thread(target=pass_on, name="stderr", daemon=True).start()
    return stderr


def _log_what_python_says() -> None:
    """Log warnings, and exceptions that nobody caught."""
    logging.captureWarnings(True)
    log = get_logger("python")

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.critical("a thread ended", exc_info=args.exc_value)

    sys.excepthook = lambda _kind, error, _places: log.critical("the process ends", exc_info=error)
    threading.excepthook = of_thread
