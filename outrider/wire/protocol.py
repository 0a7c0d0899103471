"""The protocol number, which gateways, workers and the launcher's registry of one system must share."""

from __future__ import annotations

PROTOCOL = 1
"""Version number of the messages between our processes. It is raised by each change of the messages after which a
process of an older version would misread one."""


def other_protocol(peer: str, protocol: int, own: str) -> str | None:
    """Return a sentence that says why a peer with another protocol number is refused. None = the numbers are equal.

    peer, own: names of the peer and of this process in the sentence. protocol: the peer's protocol number.
    """
    if protocol == PROTOCOL:
        return None
    return f"{peer} speaks protocol {protocol}, {own} {PROTOCOL}; install the same version of Outrider for both"
