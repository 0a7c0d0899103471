"""What ranks say to each other, how they meet, and which models can be split."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, LlamaConfig

from outrider.engine.kv_pool import KVPool
from outrider.engine.parallel import messages
from outrider.engine.parallel.checks import check_can_split
from outrider.engine.parallel.meeting import join_host, make_meeting_place, receive_guests
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError, Unavailable


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_a_follower_reads_of_a_row_what_a_path_may_read(sizes: list[tuple[int, int, int]]) -> None:
    pool, rows = KVPool(64, 4), []
    for num_cached, num_new, num_logits in sizes:
        table = pool.new_table()
        table.reserve(num_cached + num_new)
        row = Row.of(table, list(range(100, 100 + num_cached + num_new)), num_cached, min(num_logits, num_new))
        rows.append(replace(row, parents=[-1, *[0] * (num_new - 1)] if num_new % 2 else None))
    widest = max(row.num_new for row in rows)
    for with_past in (False, True):
        kind, (said,) = messages.decode(messages.encode_forward(rows, with_past=with_past))
        assert kind == messages.FORWARD
        for row, found in zip(rows, said, strict=True):
            assert (list(found.new_ids), found.num_cached, found.num_logits) == (
                *(list(row.new_ids), row.num_cached, row.num_logits),
            )
            assert (found.table.blocks, found.table.block_size) == (row.table.blocks, 4)
            width = min(widest, row.num_tokens) if with_past else row.num_new
            assert found.last_ids(width) == row.last_ids(width)
            assert found.parents == row.parents


def test_ranks_meet_in_any_order_and_miss_each_other_at_once(tmp_path: Path) -> None:
    hosts = {}

    def come(rank: int) -> None:
        hosts[rank] = join_host(tmp_path, rank, 10)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    guests = receive_guests(tmp_path, 3, 10)
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
        receive_guests(tmp_path, 3, 0.05)
    with pytest.raises(Unavailable, match="rank 0 does not listen"):
        join_host(tmp_path, 1, 0.05)


def test_the_meeting_place_is_private(tmp_path: Path) -> None:
    mode = make_meeting_place(tmp_path / "new").stat().st_mode
    assert mode & 0o077 == 0
    os.chmod(tmp_path / "new", 0o755)
    with pytest.raises(ConfigError, match="which others may enter"):
        make_meeting_place(tmp_path / "new")
    with pytest.raises(ConfigError, match="too long"):
        make_meeting_place(tmp_path / ("x" * 100))


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "tensor_parallel is 4 and the model has 6 attention"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 3, "tensor_parallel is 3 and the model has 2 key-value"),
    ],
)
def test_heads_that_do_not_divide_are_named(changes: dict[str, int], num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*; use tensor_parallel 1, 2 or another model"):
        check_can_split(LlamaConfig(hidden_size=384, **changes), num_ranks, "none", False)
    check_can_split(LlamaConfig(hidden_size=384, **changes), 2, "none", False)


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="BloomForCausalLM has no tensor-parallel plan"):
        check_can_split(BloomConfig(), 2, "none", False)
    with pytest.raises(ConfigError, match="tensor_parallel is 2 and quantization is 'int8'"):
        check_can_split(LlamaConfig(), 2, "int8", False)
    with pytest.raises(ConfigError, match="batch_invariant"):
        check_can_split(LlamaConfig(), 2, "none", True)
