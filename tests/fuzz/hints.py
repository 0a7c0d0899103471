"""What makes a fuzzed message reach far: slots that are open, epochs that are right, tickets that are waited for."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from tests.fuzz.values import Draw, Hints, floats

VOCAB = 320
_SLOT = st.sampled_from([1, 1, 2, 2, 3, 4, 0, 2**64 - 1])
_TICKET = st.sampled_from([1, 1, 2, 3, 4, 0, 2**64 - 1])
_ID = st.integers(0, VOCAB - 1)
_IDS = st.one_of(
    st.lists(_ID, max_size=4),
    st.sampled_from([[5, 6, 7], [5, 6, 7, 8, 9], [11] * 40, [11] * 255, [11] * 256, [11] * 400, [VOCAB], [2**32 - 1]]),
)
_LEN = st.one_of(st.integers(0, 12), st.sampled_from([3, 3, 255, 256, 2**32 - 1]))
_K = st.sampled_from([0, 1, 2, 2, 3, 5, 64, 65, 2**32 - 1])
_DRAFTER = st.sampled_from([0, 0, pb.DRAFTER_NGRAM, pb.DRAFTER_LOOKUP, pb.DRAFTER_BIGRAM, 99])
_PARAMS = st.builds(
    lambda max_tokens, temperature, top_p: pb.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, ignore_eos=True
    ),
    st.sampled_from([1, 3, 16, 200]),
    st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    st.sampled_from([1.0, 0.9]),
)


def worker_hints(epoch: int, deliver_to: list[str]) -> Hints:
    """For items of Control and Deliver. One in ten has another epoch."""
    epochs = st.sampled_from([epoch] * 9 + [0, epoch ^ 1])
    hints: dict[str, st.SearchStrategy[Any]] = {
        "OpenSlot.committed_ids": _IDS,
        "OpenSlot.num_prompt_tokens": st.sampled_from([1, 1, 2, 3, 3, 5, 40, 0, 2**32 - 1]),
        "OpenSlot.deliver_to": st.sampled_from(deliver_to),
        "OpenSlot.target_epoch": epochs,
        "Delivery.draft_ids": st.one_of(st.lists(_ID, max_size=4), _IDS),
        "Delivery.start": st.sampled_from([0, 0, 0, 1, 2, 64, 2**32 - 1]),
        "Delivery.committed_len": _LEN,
        "Delivery.target_epoch": epochs,
        "Delivery.distributions": _distributions(),
        "Delivery.parents": st.one_of(st.just([]), st.lists(st.integers(-1, 3), max_size=4), st.just([2**31 - 1])),
        "TreeShape.widths": st.lists(st.sampled_from([1, 2, 3, 0, 64, 2**32 - 1]), max_size=4),
        "TreeShape.num_nodes": st.sampled_from([0, 0, 1, 5, 64, 2**32 - 1]),
        "TreeShape.max_depth": st.sampled_from([0, 1, 3, 64, 2**32 - 1]),
        "Verify.wait_budget_us": st.sampled_from([0, 0, 1000, 5000, 60_000_000, 2**32 - 1]),
        "Verify.num_own_draft_tokens": _K,
        "OpenSlot.drafter": _DRAFTER,
    }
    for kind in ("OpenSlot", "Verify", "Propose", "Truncate", "CloseSlot"):
        hints[f"{kind}.slot"] = _SLOT
    for kind in ("Verify", "Propose"):
        hints |= {f"{kind}.base_len": _LEN, f"{kind}.committed_ids": _IDS}
    for kind in ("Verify", "Propose", "Delivery"):
        hints |= {f"{kind}.num_draft_tokens": _K, f"{kind}.ticket": _TICKET}
    for kind in ("TargetRequest", "DraftRequest"):
        hints |= {f"{kind}.epoch": epochs, f"{kind}.id": st.integers(0, 50)}
    return hints


def valid_item(draw: Draw, request: type[Any], epoch: int, deliver_to: str) -> Any:
    """An item of a small story: three slots of three committed tokens each, opened, asked, cut and closed."""
    slot = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["open", "open", "ask", "ask", "ask", "truncate", "close"]))
    item = request(id=slot, epoch=epoch)
    if kind == "open":
        opened = pb.OpenSlot(slot=slot, committed_ids=[5, 6, 7], num_prompt_tokens=3, params=draw(_PARAMS))
        opened.deliver_to, opened.target_epoch = deliver_to, epoch
        opened.drafter = draw(st.sampled_from([pb.DRAFTER_UNSPECIFIED, pb.DRAFTER_NGRAM, pb.DRAFTER_LOOKUP]))
        item.open.CopyFrom(opened)
    elif kind == "truncate":
        item.truncate.CopyFrom(pb.Truncate(slot=slot, committed_len=3, reason=1))
    elif kind == "close":
        item.close.CopyFrom(pb.CloseSlot(slot=slot))
    else:
        ids = [11] * draw(st.integers(0, 2))
        ask = item.verify if request is tpb.TargetRequest else item.propose
        ask.slot, ask.base_len, ask.num_draft_tokens = slot, 3, draw(st.integers(0, 3))
        ask.ticket = draw(st.integers(1, 4))
        ask.committed_ids.extend(ids)
        if request is tpb.TargetRequest:
            ask.wait_budget_us = 2000
            if not ask.num_draft_tokens:
                ask.num_own_draft_tokens = draw(st.integers(0, 3))
        elif draw(st.booleans()):
            ask.tree.widths.extend(draw(st.sampled_from([[1], [2], [2, 1]])))
    return item


def valid_part(draw: Draw, epoch: int) -> tpb.Delivery:
    """A whole proposal after three to five committed tokens."""
    ids = draw(st.lists(_ID, min_size=1, max_size=3))
    length = draw(st.integers(3, 5))
    part = tpb.Delivery(ticket=draw(st.integers(1, 4)), target_epoch=epoch, committed_len=length, draft_ids=ids)
    part.num_draft_tokens, num_rows = len(ids), len(ids)
    if draw(st.booleans()):  # a tree; siblings that are alike are refused
        part.parents.extend(draw(st.integers(-1, node - 1)) for node in range(len(ids)))
        num_rows = len(set(part.parents))
    if draw(st.booleans()):
        rows = floats([-math.log(VOCAB)] * VOCAB) * num_rows
        part.distributions.vocab_size = VOCAB
        part.distributions.dense.CopyFrom(pb.Tensor(dtype=1, shape=[num_rows, VOCAB], data=rows))
    return part


@st.composite
def _distributions(draw: Any) -> pb.TokenDistributions:
    """Rows of the right form, with values that may be none: NaN, positive, not normalised, ids out of range."""
    num_rows = draw(st.integers(0, 4))
    value = st.sampled_from([0.0, -1.0, -math.inf, math.nan, 1.0, 1e38, -math.log(VOCAB)])
    vocab = draw(st.sampled_from([VOCAB] * 5 + [0, VOCAB - 1, 2**32 - 1]))
    if draw(st.booleans()):
        shape = [num_rows, draw(st.sampled_from([VOCAB] * 5 + [1, 2**32 - 1]))]
        row = floats([draw(value)] + [-math.log(VOCAB)] * (VOCAB - 1))
        dense = pb.Tensor(dtype=draw(st.sampled_from([1, 1, 1, 2, 0])), shape=shape, data=row * num_rows)
        return pb.TokenDistributions(vocab_size=vocab, dense=dense)
    sizes = [draw(st.sampled_from([1, 2, 3, 0, VOCAB, 2**32 - 1])) for _ in range(num_rows)]
    total = sum(size for size in sizes if size < 1000)
    ids = b"".join(draw(st.sampled_from([i, i, 0, VOCAB, 2**31])).to_bytes(4, "little") for i in range(min(total, 12)))
    ids += bytes(4 * max(0, total - 12))
    logs = floats([draw(value) for _ in range(min(total, 12))] + [-1.0] * max(0, total - 12))
    return pb.TokenDistributions(
        vocab_size=vocab,
        sparse_ids=pb.Tensor(dtype=2, shape=[total], data=ids),
        sparse_log_probs=pb.Tensor(dtype=1, shape=[total], data=logs),
        row_sizes=sizes,
    )
