"""A draft none of whose proposals can be true: each breaks one rule, in turn. For the demo pair at K = 5."""

import itertools
import sys

from draft_service.deliveries import Deliverer
from draft_service.worker import start_worker
from outrider.v1 import common_pb2 as pb
from outrider.wire.settings.config import DraftConfig
from outrider.wire.worker_main import run_worker
from tests.law.faults import replace

to_proto = Deliverer._to_proto


def id_out_of_range(message):
    message.draft_ids[0] = 4096


def too_many_ids(message):
    message.draft_ids.append(1)


def too_few_values(message):
    tensor = message.distributions.dense
    tensor.data = tensor.data[:-4]


def too_narrow_rows(message):
    message.distributions.vocab_size -= 1


def wrong_dtype(message):
    message.distributions.dense.dtype = pb.TENSOR_DTYPE_INT32


def nan_log_probs(message):
    tensor = message.distributions.dense
    tensor.data = b"\xff" * len(tensor.data)


def no_log_probs(message):
    message.ClearField("distributions")


def stale_epoch(message):
    message.target_epoch -= 1


def wrong_committed_len(message):
    message.committed_len += 1


def wrong_start(message):
    message.start += 1
    del message.draft_ids[-1]


OF_IDS = {
    id_out_of_range: "drafted id 4096 is outside 0 to 4095",
    too_many_ids: "more than the 5 ids announced",
    stale_epoch: "proposal is for target epoch",
    wrong_committed_len: "proposal continues length",
    wrong_start: "part starts at 1, expected 0",
}
"""What the target's log says of each. Proposals at temperature 0 have no distributions to lie with."""
OF_LAWS = {
    too_few_values: "bytes, its shape",
    too_narrow_rows: "vocab_size is 4095, the target's is 4096",
    wrong_dtype: "has dtype",
    nan_log_probs: "log-probs hold NaN",
    no_log_probs: "distributions are missing",
}

turns = {True: itertools.cycle(OF_IDS), False: itertools.cycle(OF_LAWS)}
lie_of_ticket = {}


def to_lying_proto(self, part):
    """Every part of a proposal tells the same lie."""
    message = to_proto(self, part)
    if part.ticket not in lie_of_ticket:
        lie_of_ticket[part.ticket] = next(turns[part.rows is None])
    lie_of_ticket[part.ticket](message)
    return message


if __name__ == "__main__":
    replace(Deliverer, "_to_proto", to_lying_proto)
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
