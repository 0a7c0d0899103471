"""What `benchmarks.host` computes: accounts, lines, events and ratios."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from benchmarks.host.accounts import Spent, StepCost, geometric_mean, process_cpu_s
from benchmarks.host.cells import CELLS, Arrivals
from benchmarks.host.forward_clock import ForwardCounts, Forwards
from benchmarks.host.tables import over_cells


def test_the_accounts_are_those_of_the_process() -> None:
    assert time.process_time() <= process_cpu_s(os.getpid()) <= time.process_time()


def test_forwards_are_taken_off_between_two_moments() -> None:
    before = Spent({"target": 5.0, "gateway": 1.0}, {"target": Forwards(10, 20, 30, 2.0)})
    after = Spent({"target": 9.0, "gateway": 1.5}, {"target": Forwards(14, 36, 50, 3.0)})
    spent = after.since(before)
    assert spent.forwards["target"] == Forwards(4, 16, 20, 1.0)
    assert (spent.host_s("target"), spent.host_s("gateway")) == (3.0, 0.5)
    assert (spent.total_host_s, spent.total_cpu_s) == (3.5, 4.5)


def test_what_a_worker_counts_is_read_by_another_map_of_its_file(tmp_path: Path) -> None:
    reader, writer = ForwardCounts(tmp_path / "target"), ForwardCounts(tmp_path / "target")
    writer.write(Forwards(3, 48, 60, 0.25))
    assert reader.read() == Forwards(3, 48, 60, 0.25)


def test_a_line_of_steps_and_how_far_a_point_is_off() -> None:
    cost = StepCost.fit([1, 16, 64], [0.3 + 0.1 * slots for slots in (1, 16, 64)])
    assert (cost.fixed_s, cost.slot_s) == pytest.approx((0.3, 0.1))
    assert cost.max_error == pytest.approx(0.0, abs=1e-9)
    # at 1 the line lies at 0.98: of 0.9 and 1.1, the smaller weighs more
    assert StepCost.fit([1, 1, 2, 2], [1.1, 0.9, 2.0, 2.0]).max_error == pytest.approx(1.1 / 0.9802 - 1, abs=1e-4)


def test_an_event_in_two_pieces_counts_once_and_each_arrival_gives_one_gap() -> None:
    arrivals = Arrivals()
    for now_s, data in enumerate((b"HTTP/1.1 200 OK\r\n\r\n", b"data: {1}\n\ndat", b"a: {2}\n\ndata: {3}\n\n", b"")):
        arrivals.add(data, float(now_s))
    arrivals.add(b"data: {4}\n\ndata: [DONE]\n\n", 5.0)
    assert (arrivals.num_events, arrivals.gaps_s) == (4, [1.0, 3.0])


def test_ratios_are_averaged_as_ratios() -> None:
    mean, low, high = geometric_mean([0.5, 2.0])
    assert mean == pytest.approx(1.0)
    assert math.log(high) == pytest.approx(-math.log(low))
    assert over_cells({CELLS[0]: [2.0, 4.0], CELLS[1]: [8.0, 1.0]}) == pytest.approx([4.0, 2.0])
