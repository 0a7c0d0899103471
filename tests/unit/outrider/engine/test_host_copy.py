"""What comes down from a device for several slots comes in one wait, and is what the host makes itself."""

import numpy as np
import torch

from draft_service.drafters.block_drafter import split_rows
from outrider.engine.host_copy import DeferredCopies
from target_service.leases.slot_search import best_tokens
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda


def test_the_first_tensor_that_is_read_brings_all(device: FakeCuda) -> None:
    copies = DeferredCopies[int]()
    assert copies.get(0) is None
    for key in range(3):
        copies.add(key, torch.arange(4, device="cuda") + key)
    device.take()
    found = [copies.get(key) for key in range(3)]
    assert len(device.take().waits) == 1
    assert [None if each is None else each.tolist() for each in found] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    copies.add(0, torch.zeros(2, device="cuda"))
    copies.add(1, torch.ones(2, device="cuda"))
    copies.drop(1)
    device.take()
    again, kept = copies.get(0), copies.get(2)
    assert len(device.take().waits) == 1 and again is not None and again.tolist() == [0, 0]
    assert kept is found[2] and copies.get(1) is None


def test_beams_read_the_best_tokens_of_all_rows_at_once(device: FakeCuda) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[3, 7] = torch.nan
    expected, there = best_tokens(logits, 6), logits.to("cuda")
    device.take()
    found = best_tokens(there, 6)
    assert len(device.take().waits) == 1
    assert found.are_finite.tolist() == expected.are_finite.tolist() == [True, True, True, False, True]
    sound = expected.are_finite
    assert np.array_equal(found.ids[sound], expected.ids[sound])
    assert np.allclose(found.log_probs[sound], expected.log_probs[sound])


def test_parts_of_what_was_copied_keep_nothing_of_the_others(device: FakeCuda) -> None:
    rows = torch.arange(12.0, device="cuda").view(4, 3)
    device.take()
    copied = rows.cpu()
    parts = split_rows(copied, [1, 3])
    assert len(device.take().waits) == 1
    assert [part.untyped_storage().nbytes() for part in parts] == [12, 36]
