"""`python -m tests.rolling.workers`, after `make rolling-test`'s gateways: two targets and a draft are replaced at
their addresses, one after the other, while answers stream.

Prints a line for each. Exit code 1 when an answer is lost, or is another than the others.
"""

import asyncio
import sys

from tests.e2e.registry_load import Load, asked_at
from tests.rolling.__main__ import LOGS, say
from tests.stack import Pools, Process, running_pools

NUM_CLIENTS = 3
MAX_TOKENS = 1500
"""Of an answer, seconds of it: it is under way while a worker is replaced."""
DRAINING = ("--drain-timeout-s", "1")
"""Less than an answer takes, so that it goes on elsewhere."""
SLOW_S = 600.0
"""Seconds that an answer may take before it counts as lost: a busy machine loads a worker for minutes."""


async def replace(gateway: str, name: str, workers: list[Process]) -> list[str]:
    """Stop the first of the workers under load and start it again, at the end of the list. Return the texts."""
    load = Load(MAX_TOKENS)
    async with asked_at(gateway, load, NUM_CLIENTS, SLOW_S):
        await load.drafted_again(SLOW_S)
        old = workers.pop(0)
        code = await asyncio.to_thread(old.stop)
        assert code == 0, f"{name} ended with {code}"
        workers.append(await asyncio.to_thread(old.again))
        await load.drafted_again(SLOW_S)
    assert not load.errors, f"{name}: {len(load.errors)} answers lost: {load.errors[0]}"
    say(f"{name} replaced: {len(load.texts)} answers, none lost")
    return load.texts


async def roll(pools: Pools) -> set[str]:
    """Return the different texts of one greedy prompt."""
    gateway = str(pools.gateways[0].ready["grpc"])
    texts = await replace(gateway, "a target", pools.targets)
    texts += await replace(gateway, "the other target", pools.targets)
    texts += await replace(gateway, "the draft", pools.drafts)
    return set(texts)


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    target_args = ("--batch-invariant", *DRAINING)
    with running_pools(2, 1, target_args=target_args, draft_args=DRAINING, log_folder=LOGS) as pools:
        texts = asyncio.run(roll(pools))
    if len(texts) > 1:
        say(f"{len(texts)} different texts of one greedy prompt")
    return int(len(texts) != 1)


if __name__ == "__main__":
    sys.exit(main())
