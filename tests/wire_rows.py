"""Laws as rows of a tensor, to what crosses the wire and back: the services' own code, which works law by law."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.sampling.wire_tensors import decode_distributions, encode_distributions, scatter
from outrider.wire.transport.codec import Rows


def encode_rows(log_probs: Tensor, *, prefer_sparse: bool) -> Rows:
    """[R, V] float32 log-probs, -inf outside the support."""
    return encode_distributions(
        [TokenDistribution(row.size, row) for row in log_probs.cpu().numpy()], prefer_sparse=prefer_sparse
    )


def decode_rows(rows: Rows, vocab_size: int, draft_ids: Sequence[int]) -> Tensor:
    """[R, V] float32 log-probs, -inf outside the support."""
    laws = decode_distributions(rows, vocab_size, [[token_id] for token_id in draft_ids])
    return scatter(list(enumerate(laws)), len(laws), vocab_size, torch.device("cpu"))
