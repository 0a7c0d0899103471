"""The distribution after a node, from a model's logits or from a table's counts."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider.drafting.sequence_drafter import Counts
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.node_drafter import distribution_of_logits, distribution_of_table
from outrider.wire.requests.params import SamplingParams

TREE = cast(Any, None)
STATE = SamplingState(SamplingParams(temperature=1.0), [1], ())


def test_the_row_of_the_node_is_read() -> None:
    host = HostLogits(torch.tensor([[9.0, 0.0, 0.0], [0.0, np.log(3.0), np.log(2.0)]]))
    found = distribution_of_logits(TREE, 4, STATE, host, 1)
    law = found.distribution(LogitRow(STATE))
    assert law is not None and found.best is not None and found.node == 4
    ids, probs = found.best(LogitRow(STATE), 2)
    assert list(ids) == [1, 2] and list(probs) == pytest.approx([3 / 6, 2 / 6])


def test_a_table_is_read_after_the_path_and_may_have_no_entry() -> None:
    def counts_after(path: Any) -> Counts | None:
        return (np.array([2]), np.array([5.0])) if tuple(path) == (7, 8) else None

    found = distribution_of_table(TREE, ROOT, STATE, counts_after, 9)
    assert found.best is None
    assert found.distribution(LogitRow(STATE, (7,))) is None
    law = found.distribution(LogitRow(STATE, (7, 8)))
    assert law is not None and law.scores.size == 1
