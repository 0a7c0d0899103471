"""`python -m tests.e2e.named_gateway FOLDER ...`: the gateway, for whom a name is a file there with its addresses."""

import asyncio
import functools
import sys
from pathlib import Path

from gateway import __main__ as gateway
from gateway.workers.named_workers import NamedWorkers


async def resolve(folder: Path, host: str) -> list[str]:
    return await asyncio.to_thread(lambda: (folder / host).read_text().split())


if __name__ == "__main__":
    gateway.NamedWorkers = functools.partial(NamedWorkers, resolve=functools.partial(resolve, Path(sys.argv[1])))
    sys.exit(gateway.main(sys.argv[2:]))
