"""Once every stream has ended: all is as before the first fault, and nothing is left.

Then the parts are stopped in turn, and no connection stays open.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.client import AsyncClient, OutriderError, Speculation
from tests.chaos.questions import Asked
from tests.chaos.system import System
from tests.chaos.watching import Samples, Watcher, num_proposed
from tests.samples import total
from tests.stack import read_metrics

RECOVERED_WITHIN_S = 40.0
"""Of the last fault's end: a breaker's pause is at most 15 s, and each gateway is asked in turn."""
PROBE_TOKENS = 24
PROBES_PER_DRAFT = 4
SETTLED_WITHIN_S = 20.0
ESTABLISHED = "01"


async def not_recovered(system: System, watcher: Watcher, asked: Sequence[Asked]) -> list[str]:
    """With the system running and idle: new streams, through every gateway and with every draft's proposals."""
    found: list[str] = []
    give_up_s = time.monotonic() + RECOVERED_WITHIN_S
    for gateway in range(len(system.pools.gateways)):
        while (missing := await _missing(system, watcher, asked, gateway)) and time.monotonic() < give_up_s:  # noqa: ASYNC110
            await asyncio.sleep(1.0)  # and asks again
        found += [f"gateway {gateway}, {RECOVERED_WITHIN_S:g} s after the last fault: {each}" for each in missing]
    return found


async def _missing(system: System, watcher: Watcher, asked: Sequence[Asked], gateway: int) -> list[str]:
    """Some short streams at once through this gateway, then what is not as it was."""
    drafts = range(len(system.pools.drafts))
    before = [await watcher.draft(index) for index in drafts]
    count = PROBES_PER_DRAFT * max(1, len(drafts))
    async with AsyncClient(system.pools.grpc(gateway), retries=0) as client:
        missing = await asyncio.gather(*(_probe(client, each, bool(drafts)) for each in asked[:count]))
    after = [await watcher.draft(index) for index in drafts]
    samples = await watcher.gateway(gateway)
    unused = [
        f"draft {index} made no proposals"
        for index, (old, new) in enumerate(zip(before, after, strict=True))
        if old is None or new is None or num_proposed(new) <= num_proposed(old)
    ]
    return [*filter(None, missing), *unused, *(["no metrics"] if samples is None else not_well(samples, system))]


def not_well(samples: Samples, system: System) -> list[str]:
    """By a gateway's metrics: links that are down, breakers that are open."""
    pools = system.pools
    members = [f"target-{index}" for index in range(len(pools.targets))]
    members += [f"draft-{index}" for index in range(len(pools.drafts))]
    lost = [each for each in members if total(samples, "outrider_worker_connected", member=each) != 1]
    broken = [each for each in members if total(samples, "outrider_breaker_open", member=each)]
    return [*(f"{each} is not connected" for each in lost), *(f"the breaker of {each} is open" for each in broken)]


async def _probe(client: AsyncClient, asked: Asked, drafted: bool) -> str | None:
    """What is wrong with its answer; with drafts, it has verified proposals."""
    num_tokens = min(PROBE_TOKENS, asked.question.max_tokens)
    wish = Speculation(num_draft_tokens=5) if drafted else False
    try:
        made = await client.generate(
            asked.question.prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            speculation=wish,
            timeout_s=RECOVERED_WITHIN_S,
        )
    except OutriderError as error:
        return f"{type(error).__name__}: {error}"
    if tuple(token.id for token in made.choices[0].tokens) != asked.answer.ids[:num_tokens]:
        return "a wrong answer"
    return "a stream without verified proposals" if drafted and not made.usage.num_rounds else None


def held(system: System) -> dict[str, dict[str, int]]:
    """Whatever is not 0, by part."""
    pools = system.pools
    found = {}
    for role, members in (("target", pools.targets), ("draft", pools.drafts)):
        for index in range(len(members)):
            info = system.info(role, index)
            found[f"{role} {index}"] = {
                "slots": info.num_slots_in_use,
                "blocks": info.num_kv_blocks_in_use,
                "tickets": info.num_leases,
            }
    for index, target in enumerate(pools.targets):
        metrics = read_metrics(f"http://{target.ready['metrics_address']}/metrics")
        found[f"target {index}"]["bytes of rows"] = int(total(metrics, "outrider_worker_kept_feature_bytes"))
    for index in range(len(pools.gateways)):
        metrics = read_metrics(f"{pools.http(index)}/metrics")
        found[f"gateway {index}"] = {
            "running": int(metrics["outrider_running"]),
            "waiting": int(metrics["outrider_queue_depth"]),
        }
    left = {part: {name: count for name, count in counts.items() if count} for part, counts in found.items()}
    return {part: counts for part, counts in left.items() if counts}


def leaks(system: System) -> list[str]:
    """With the system running and idle."""
    give_up_s = time.monotonic() + SETTLED_WITHIN_S
    while (left := held(system)) and time.monotonic() < give_up_s:
        time.sleep(0.2)
    return [f"{part} still holds {counts}" for part, counts in left.items()]


def num_connections(address: str) -> int:
    """Established ones that somebody has made to this address, on this machine."""
    port = int(address.rpartition(":")[2])
    tables = (Path(f"/proc/net/{name}") for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sum(int(row[1].rpartition(":")[2], 16) == port and row[3] == ESTABLISHED for row in rows)


def open_streams(system: System) -> list[str]:
    """Stops the gateways, then the drafts: nobody is connected to the drafts, then to the targets."""
    found = []
    pools = system.pools
    gc.collect()  # calls of message relays that have ended lie in cycles, and hold their connections
    for stopped, left in ((pools.gateways, pools.drafts), (pools.drafts, pools.targets)):
        for process in stopped:
            code = process.stop()
            if code != 0:
                found.append(f"{process.module} left with exit code {code} at the end")
        give_up_s = time.monotonic() + SETTLED_WITHIN_S
        while any(num_connections(member.address) for member in left) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        found += [
            f"{count} connections to {member.module} at {member.address} are open with nobody there"
            for member in left
            if (count := num_connections(member.address))
        ]
    return found
