"""A draft none of whose deliveries can be true: each breaks one rule, in turn."""

import itertools

import draft_service.targets.deliveries
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from tests.law.faults import replace, run_draft

to_proto = draft_service.targets.deliveries.write_delivery


def id_out_of_range(message):
    message.ids = (4096).to_bytes(4, "little") + message.ids[4:]


def too_many_ids(message):
    message.ids += bytes(4)


def stale_epoch(message):
    message.target_epoch -= 1


def later_parent(message):
    message.parents = (7).to_bytes(4, "little") + message.parents[4:]


def unknown_kind(message):
    message.kinds = b"\x09" + message.kinds[1:]


def log_probs_of(message):
    rows = message.distributions
    return rows.dense if rows.HasField("dense") else rows.sparse_logprobs


def too_few_values(message):
    tensor = log_probs_of(message)
    tensor.data = tensor.data[:-4]


def too_narrow_rows(message):
    message.distributions.vocab_size -= 1


def wrong_dtype(message):
    log_probs_of(message).dtype = pb.TENSOR_DTYPE_INT32


def nan_log_probs(message):
    tensor = log_probs_of(message)
    tensor.data = b"\xff" * len(tensor.data)


def no_log_probs(message):
    message.ClearField("distributions")


OF_IDS = {
    id_out_of_range: "ids hold 4096, outside 0 to 4095",
    too_many_ids: "each node has one",
    stale_epoch: "delivery is for target epoch",
    later_parent: "parent of node 0 is 7",
    unknown_kind: "kinds hold 9",
}
"""What the target's log says of each. What is delivered at temperature 0 has no distributions to lie with."""
OF_LAWS = {
    too_few_values: "bytes, its shape",
    too_narrow_rows: "vocab_size is 4095, the target's is 4096",
    wrong_dtype: "has dtype",
    nan_log_probs: "log-probs hold NaN",
    no_log_probs: "distributions are missing",
}

turns = {True: itertools.cycle(OF_LAWS), False: itertools.cycle(OF_IDS)}
at_root = itertools.cycle([nan_log_probs, *OF_LAWS])
"""Of what hangs under committed tokens: numbers are read where they are needed, which the others' never are."""


def to_lying_proto(nodes, target_epoch):
    message = to_proto(nodes, target_epoch)
    if message.ids:
        has_laws = message.HasField("distributions")
        is_below = tpb.NODE_KIND_REFERENCE in message.kinds
        next(turns[has_laws] if is_below or not has_laws else at_root)(message)
    return message


if __name__ == "__main__":
    replace(draft_service.targets.deliveries, "write_delivery", to_lying_proto)
    run_draft()
