"""A draft of which one answer's deliveries in 32 arrive late, and those of one in 8 with damaged log-probs. No fault of
the law: the target verifies what there is, and the output must not notice.
"""

import asyncio
import dataclasses

from draft_service.targets.deliveries import Deliverer
from outrider.wire.transport.codec import DenseDistributions
from tests.law.faults import replace, run_draft

DELAY_S = 1.2
"""Four times what the target waits that this draft is tested with."""

send = Deliverer.send


def send_unreliably(self, address, target_epoch, nodes):
    """Runs on the gRPC loop's thread. What suffers depends on the ticket alone, never on what was drawn."""
    if nodes.ticket % 32 == 1:
        asyncio.get_running_loop().call_later(DELAY_S, send, self, address, target_epoch, nodes)
    elif nodes.ticket % 8 == 3 and nodes.rows is not None:
        send(self, address, target_epoch, dataclasses.replace(nodes, rows=damaged(nodes.rows)))
    else:
        send(self, address, target_epoch, nodes)


def damaged(rows):
    """Every log-prob NaN."""
    if isinstance(rows, DenseDistributions):
        return dataclasses.replace(rows, data=b"\xff" * len(rows.data))
    return dataclasses.replace(rows, log_probs=b"\xff" * len(rows.log_probs))


if __name__ == "__main__":
    replace(Deliverer, "send", send_unreliably)
    run_draft()
