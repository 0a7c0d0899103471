"""One log format on stderr. Prompts and outputs never go here."""

from __future__ import annotations

import logging
import sys


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure_logging(level: str, process: str) -> None:
    """`process` names the part ("draft", "target", "gateway") in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one INFO line a request otherwise
    for noisy in ("torchao", "torch.utils._pytree"):  # warnings of kernels for other machines, when they are imported
        logging.getLogger(noisy).setLevel(logging.ERROR)
