"""The gateway, for whom a name is a file with its addresses."""

import asyncio
import functools
import sys
from pathlib import Path

from gateway import __main__ as gateway
from gateway.workers.named_workers import NamedWorkers


async def resolve(host: str) -> list[str]:
    return await asyncio.to_thread(lambda: Path(host).read_text().split())


if __name__ == "__main__":
    gateway.NamedWorkers = functools.partial(NamedWorkers, resolve=resolve)
    sys.exit(gateway.main(sys.argv[1:]))
