"""The number of the protocol between gateways, workers and the launcher's registry: all parts of a system have one."""

from __future__ import annotations

PROTOCOL = 1
"""It rises with a change after which the parts before would misread a message."""


def other_protocol(peer: str, protocol: int, own: str) -> str | None:
    """Return why `peer`, which speaks `protocol`, is refused by this process, `own`; None where both speak the same."""
    if protocol == PROTOCOL:
        return None
    return f"{peer} speaks protocol {protocol}, {own} {PROTOCOL}; install the same version of Outrider for both"
