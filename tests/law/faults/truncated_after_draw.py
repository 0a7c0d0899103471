"""A draft that draws from its whole law and then ships it cut to the n best tokens and the drawn one.

With the drawn token cut as well, the target would notice: it refuses a token without mass in its own row.
"""

import sys

import torch

from draft_service import proposer
from draft_service.sender import Sender
from draft_service.worker import start_worker
from outrider.wire.config import DraftConfig
from outrider.wire.worker_main import run_worker
from tests.law.faults import replace

deliver_part = Sender._deliver_part


def deliver_cut(self, a):
    if a.topk is not None:
        drawn = a.draft_ids[a.num_sent :]
        a.unsent[:] = [cut(law, a.topk, token_id) for law, token_id in zip(a.unsent, drawn, strict=True)]
    deliver_part(self, a)


def cut(law, n, token_id):
    """[V] float32 log-probs -> the same, over the n best and token_id."""
    kept = torch.zeros_like(law, dtype=torch.bool)
    kept[law.topk(n).indices] = True
    kept[token_id] = True
    return law.masked_fill(~kept, -torch.inf).log_softmax(0)


if __name__ == "__main__":
    replace(proposer, "truncate_topk", lambda log_probs, n: log_probs)
    replace(Sender, "_deliver_part", deliver_cut)
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
