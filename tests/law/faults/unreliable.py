"""A draft whose every fourth proposal arrives late and every fourth with damaged log-probs. No fault of the law:
the target takes plain steps instead, and the output must not notice.
"""

import asyncio
import dataclasses
import sys

from draft_service import deliveries
from draft_service.worker import start_worker
from outrider.wire.codec import DenseRows
from outrider.wire.config import DraftConfig
from outrider.wire.worker_main import run_worker

DELAY_S = 0.1
"""Four times the wait budget of the gateway that this draft is tested with."""


class Deliverer(deliveries.Deliverer):
    """Runs on the gRPC loop's thread. Which proposals suffer depends on the ticket alone, never on what they say."""

    def send(self, part):
        if part.ticket % 4 == 1:
            asyncio.get_running_loop().call_later(DELAY_S, super().send, part)
        elif part.ticket % 4 == 3 and part.rows is not None:
            super().send(dataclasses.replace(part, rows=damaged(part.rows)))
        else:
            super().send(part)


def damaged(rows):
    """Every log-prob NaN."""
    if isinstance(rows, DenseRows):
        return dataclasses.replace(rows, data=b"\xff" * len(rows.data))
    return dataclasses.replace(rows, log_probs=b"\xff" * len(rows.log_probs))


if __name__ == "__main__":
    deliveries.Deliverer = Deliverer
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
