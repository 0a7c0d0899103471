"""Compares a draft's tokenizer with its target's in a separate process, so that a draft's files never block the event
loop.

`python -m gateway.workers.drafts.comparison` is that process. `json` holds the GIL while it parses, so that a thread
would not do.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import first_difference
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

TIMEOUT_S = 20.0
"""Maximal duration of a comparison, in seconds. Measured: 2 s for two tokenizers of 262,000 tokens."""
MAX_MEMORY_BYTES = 2 << 30
"""Maximal address space of the comparing process, in bytes. Measured: 0.4 GiB for two tokenizers of 262,000 tokens."""
_LENGTH_BYTES = 8
"""Size of the length that precedes the target's tokenizer.json on stdin, in bytes."""


async def difference_between(target: pb.TokenizerFiles, draft: pb.TokenizerFiles) -> str:
    """Return a sentence that names the first token id at which two tokenizer.json files differ.

    If the draft worker's file is invalid, or the comparison takes too long, the sentence says so instead.
    """
    return await asyncio.to_thread(_run, target, draft)


def _run(target: pb.TokenizerFiles, draft: pb.TokenizerFiles) -> str:
    target_json = target.tokenizer_json
    document = len(target_json).to_bytes(_LENGTH_BYTES, "little") + target_json + draft.tokenizer_json
    command = [sys.executable, "-P", "-m", "gateway.workers.drafts.comparison"]
    try:
        done = subprocess.run(command, input=document, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("two tokenizers were not compared: %s", error)
        return f"their tokenizers differ, and were not compared within {TIMEOUT_S:g} s and {MAX_MEMORY_BYTES >> 30} GiB"
    return bound_text(done.stdout.decode(errors="replace"), MAX_REASON_BYTES)


def main() -> int:
    """Read both tokenizers from stdin and write the sentence that names their difference to stdout.

    Return the exit code: 1 if the memory is not enough, else 0.
    """
    os.nice(10)  # requests come first
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    length = int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES), "little")
    target_json = sys.stdin.buffer.read(length)
    try:
        sentence = first_difference(target_json, sys.stdin.buffer.read()) or "their tokenizers differ"
    except ConfigError as error:
        sentence = error.message
    except MemoryError:
        return 1
    sys.stdout.buffer.write(sentence.encode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
