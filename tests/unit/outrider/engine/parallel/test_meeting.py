"""What ranks say to each other, how they meet, and which models can be split."""

import os
import threading
from pathlib import Path

import pytest

from outrider.engine.parallel.meeting import accept_ranks, connect_to_rank_zero, make_meeting_place
from outrider.wire.errors import ConfigError, Unavailable


def test_ranks_meet_in_any_order_and_miss_each_other_at_once(tmp_path: Path) -> None:
    hosts = {}

    def come(rank: int) -> None:
        hosts[rank] = connect_to_rank_zero(tmp_path, rank, 10)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    guests = accept_ranks(tmp_path, 3, 10)
    for thread in threads:
        thread.join()
    assert [guest.rank for guest in guests] == [1, 2]
    for guest in guests:
        guest.commands.send(f"to {guest.rank}".encode())
    assert {rank: host.commands.receive() for rank, host in hosts.items()} == {1: b"to 1", 2: b"to 2"}
    hosts[2].report("no memory")
    hosts[2].life.close()
    hosts[2].commands.close()
    assert guests[1].life.receive() == b"no memory" and guests[1].life.receive() is None
    for guest in guests:
        guest.close()
    assert hosts[1].life.receive() is None and hosts[1].commands.receive() is None
    hosts[1].life.close()
    hosts[1].commands.close()


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"ranks \[1, 2\] of 3 did not come within 0.05 s"):
        accept_ranks(tmp_path, 3, 0.05)
    with pytest.raises(Unavailable, match="rank 0 does not listen"):
        connect_to_rank_zero(tmp_path, 1, 0.05)


def test_the_meeting_place_is_private(tmp_path: Path) -> None:
    mode = make_meeting_place(tmp_path / "new").stat().st_mode
    assert mode & 0o077 == 0
    os.chmod(tmp_path / "new", 0o755)
    with pytest.raises(ConfigError, match="which others may enter"):
        make_meeting_place(tmp_path / "new")
    with pytest.raises(ConfigError, match="too long"):
        make_meeting_place(tmp_path / ("x" * 100))
