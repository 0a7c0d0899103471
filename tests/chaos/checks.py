"""What is left once every stream has ended: nothing. Then the parts are stopped in turn, and no stream stays open."""

from __future__ import annotations

import time
from pathlib import Path

from tests.chaos.system import System
from tests.stack import read_metrics

SETTLED_WITHIN_S = 20.0
ESTABLISHED = "01"


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
                "tickets": info.num_tickets,
            }
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
