"""A draft of which one proposal in 32 arrives late and one in 8 with damaged log-probs: so few of those that are under
way together that the gateway does not leave the draft alone. No fault of the law: the target takes plain steps instead,
and the output must not notice.
"""

import asyncio
import dataclasses
import sys

from draft_service.deliveries import Deliverer
from draft_service.worker import start_worker
from outrider.wire.settings.config import DraftConfig
from outrider.wire.transport.codec import DenseRows
from outrider.wire.worker_main import run_worker
from tests.law.faults import replace

DELAY_S = 1.2
"""Four times the wait budget of the gateway that this draft is tested with."""

send = Deliverer.send


def send_unreliably(self, part):
    """Runs on the gRPC loop's thread. Which proposals suffer depends on the ticket alone, never on what they say."""
    if part.ticket % 32 == 1:
        asyncio.get_running_loop().call_later(DELAY_S, send, self, part)
    elif part.ticket % 8 == 3 and part.rows is not None:
        send(self, dataclasses.replace(part, rows=damaged(part.rows)))
    else:
        send(self, part)


def damaged(rows):
    """Every log-prob NaN."""
    if isinstance(rows, DenseRows):
        return dataclasses.replace(rows, data=b"\xff" * len(rows.data))
    return dataclasses.replace(rows, log_probs=b"\xff" * len(rows.log_probs))


if __name__ == "__main__":
    replace(Deliverer, "send", send_unreliably)
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
