"""Values of tensors on the wire."""

import math

import pytest
import torch

from outrider.engine.sampling.wire_tensors import MASS_TOLERANCE
from outrider.wire.transport.codec import BadTensor, DenseDistributions
from tests.unit.outrider.wire.transport.rows import laws
from tests.wire_rows import decode_rows

VOCAB = 50


def test_every_bad_value_is_named() -> None:
    good, ids = laws(2, VOCAB)

    def changed(value: float) -> torch.Tensor:
        out = good.clone()
        out[1, (ids[1] + 1) % VOCAB] = value
        return out

    no_mass = good.clone()
    no_mass[1, ids[1]] = -torch.inf
    cases = [
        (changed(math.nan), "NaN"),
        (changed(math.inf), "sum to"),
        (changed(0.0), "sum to"),
        (good + math.log1p(2 * MASS_TOLERANCE), "sum to"),
        (good - 1.0, "sum to"),
        (torch.full_like(good, -torch.inf), "sum to"),
        (no_mass.log_softmax(dim=1), "probability 0"),
    ]
    for log_probs, named in cases:
        rows = DenseDistributions(2, log_probs.numpy().tobytes())
        with pytest.raises(BadTensor, match=named):
            decode_rows(rows, VOCAB, ids)
