"""Log-probs and scores that are reported."""

import pytest
import torch

from outrider.engine.sampling.reported import pack_ranks, reported, unpack_ranks
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda


def test_a_prompts_scores_are_those_of_its_logits(device: FakeCuda) -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    ids = [3, 29, 0, 8]
    on_device = logits.to("cuda")
    device.take()
    there = pack_ranks(on_device, ids, 2)
    assert not device.take().waits
    found = unpack_ranks(there.cpu().numpy(), 2)
    laws = logits.double().log_softmax(dim=1)
    assert found is not None
    for row, ((own, best, _), rank) in enumerate(found):
        assert own == pytest.approx(float(laws[row, ids[row]]), abs=1e-5)
        assert rank == 1 + int((laws[row] > laws[row, ids[row]]).sum())
        assert list(best) == laws[row].topk(2).indices.tolist()
    logits[2, 5] = torch.inf
    assert unpack_ranks(pack_ranks(logits, ids, 2).numpy(), 2) is None


def test_equals_are_reported_by_id() -> None:
    (_, ids, values), *_ = reported(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [0], 3)
    assert ids == (1, 3, 2) and values[0] == values[1]
