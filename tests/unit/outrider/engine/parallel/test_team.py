"""Ranks compute the same forwards or end together: whatever happens to one of them, and whenever."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading import loader
from outrider.engine.loading.attention_choice import choose_path
from outrider.engine.loading.loaded import load_split
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.parallel import rank_messages as messages
from outrider.engine.parallel import team
from outrider.engine.parallel.meeting import RankZeroLines, connect_to_rank_zero
from outrider.engine.parallel.team import ParallelPath, Team
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.wire.errors import ConfigError, InvalidRequest, OutriderError, Unavailable
from outrider.wire.settings.config import TargetConfig
from tests.forked import Forked
from tests.rounds import largest_error, largest_tree_error, some_ids, truth_of
from tests.tiny_models import tiny_llama

VOCAB_SIZE = 97
TOLERANCE = 1e-4
"""Largest logit difference, float32."""
STEP_TIMEOUT = timedelta(seconds=1)
AT_ONCE_S = 20.0
"""Also on a busy machine, and far from any timeout of a process group."""

CPU_ONLY = pytest.mark.skipif(
    torch.cuda.is_available(), reason="transformers would split over the GPUs of this process"
)
SPLITS_ANY_VOCABULARY = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="it refuses an odd vocabulary for two ranks"
)

pytestmark = pytest.mark.timeout(90)


class Computes:
    """Rank 0's own part of a forward: ends as it is told to."""

    name, block_size, kv_bytes_per_token, batch_invariant = "dense", 16, 1, False
    error: Exception | None = None

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self.forward([])

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.forward([])

    def move_tokens(self, from_indices: Sequence[int], to_indices: Sequence[int]) -> None:
        self.forward([])

    def forward(self, rows: Sequence[Row]) -> Tensor:
        if self.error is not None:
            raise self.error
        return torch.zeros(sum(row.num_logits for row in rows), VOCAB_SIZE)


class Met:
    """A team over real lines, whose other rank is this test."""

    def __init__(self, team: Team, host: RankZeroLines, lost: list[OutriderError]) -> None:
        self.team, self.host, self.lost = team, host, lost
        self.part = Computes()
        self.path = ParallelPath(self.part, team, VOCAB_SIZE)

    def told(self) -> list[str]:
        """Until rank 0 ended the line."""
        self.team.close()
        return [messages.decode(said)[0] for said in iter(self.host.commands.receive, None)]


@contextmanager
def met(folder: Path) -> Iterator[Met]:
    lost: list[OutriderError] = []
    leader = Team(2, lost.append)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(connect_to_rank_zero, folder, 1, 10)
        leader.meet(torch.device("cpu"), config_of("any"), str(folder))
        host = coming.result()
    try:
        assert host.commands.receive()  # the settings
        yield Met(leader, host, lost)
    finally:
        leader.close()
        host.commands.close()
        host.life.close()


def row_of(ids: list[int]) -> Row:
    table = KVPool(-(-len(ids) // 16), 16).new_table()
    table.reserve(len(ids))
    return Row.of(table, ids, 0, 1)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), InvalidRequest("found out late")])
@pytest.mark.parametrize("what", ["forward", "copy", "move", "storage"])
def test_what_fails_on_rank_0_alone_ends_the_team(
    error: Exception, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "GRACE_S", 0.01)  # no rank's end is to be waited for
    with met(tmp_path / "ranks") as found:
        do = {
            "forward": lambda: found.path.forward([row_of([1, 2, 3])]),
            "copy": lambda: found.path.copy_blocks([(1, 2)]),
            "move": lambda: found.path.move_tokens([40], [39]),
            "storage": lambda: found.path.set_storage(4, 16),
        }[what]
        found.part.error = error
        with pytest.raises(Unavailable, match=f"2 ranks no longer work together: {type(error).__name__}: {error}"):
            do()
        found.part.error = None
        with pytest.raises(Unavailable, match="no longer work together"):
            do()
        assert [str(reason) for reason in found.lost] == [str(found.team.loss_error)]
        assert len(found.told()) == 1, "the other ranks are told nothing more, nor that they end in good order"


def test_a_wrong_token_is_its_sender_s_business_alone(tmp_path: Path) -> None:
    with met(tmp_path / "ranks") as found:
        with pytest.raises(InvalidRequest, match="token id 97 is outside the vocabulary"):
            found.path.forward([row_of([1, 2]), row_of([3, 97])])
        assert found.path.forward([row_of([1, 2])]).shape == (1, VOCAB_SIZE)
        assert not found.lost and found.told() == [messages.FORWARD, messages.END]


def test_a_rank_that_does_not_listen_ends_the_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the message has left by then, so nothing can follow it."""
    monkeypatch.setattr(team, "MEETING_TIMEOUT_S", 1.5)
    monkeypatch.setattr(team, "GRACE_S", 0.01)
    with met(tmp_path / "ranks") as found:
        for ids in (some_ids(500_000, VOCAB_SIZE, 1), [1]):
            with pytest.raises(Unavailable, match="TimeoutError"):
                found.path.forward([row_of(ids)])
        assert len(found.lost) == 1


def config_of(folder: str, **changes: Any) -> TargetConfig:
    fixed: dict[str, Any] = {"model": folder, "device": "cpu", "kv_cache_tokens": 1024, "max_slots": 4}
    return TargetConfig(**fixed | {"tensor_parallel": 2} | changes)


def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sets these for good, in a process of its own."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0" if name == "LOCAL_RANK" else "lo")


@contextmanager
def forked(module: str, *args: str) -> Iterator[Forked]:
    """A rank above 0, ended with the test."""
    process = Forked(module, list(args))
    try:
        yield process
    finally:
        process.kill()
        process.wait(AT_ONCE_S)
        process.stdout.close()


@CPU_ONLY
@SPLITS_ANY_VOCABULARY
def test_a_rank_that_is_killed_is_no_fault_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path then fails in a sum, and none is to blame."""
    keep_environment(monkeypatch)
    model, ranks, lost = tiny_llama(tmp_path, VOCAB_SIZE), tmp_path / "ranks", list[OutriderError]()
    config = config_of(model)
    with forked("outrider.engine.loading.rank_process", str(ranks), "1", "0") as rank_process:

        def kill_and_choose(*args: Any) -> ModelRunner:
            rank_process.kill()
            rank_process.wait(AT_ONCE_S)
            return choose_path(*args)

        monkeypatch.setattr(loader, "choose_path", kill_and_choose)
        with pytest.raises(Unavailable, match="rank 1 of 2 is lost, its process has ended") as caught:
            load_split(config, lost.append, str(ranks))
    assert "cannot be served" in str(caught.value.__cause__)
    assert len(lost) == 1 and not torch.distributed.is_initialized()


def test_a_load_s_own_error_is_raised_rather_than_the_loss_that_came_with_it() -> None:
    def load(engine: EngineThread) -> None:
        engine.fail(Unavailable("rank 1 of 2 is lost"))
        raise ConfigError("the weights are damaged")

    with pytest.raises(ConfigError, match="the weights are damaged"):
        EngineThread(load, lambda answers: None).start()


@CPU_ONLY
@SPLITS_ANY_VOCABULARY
def test_two_ranks_compute_what_one_does_until_one_of_them_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the dense path, which feeds cached tokens again on every rank. Both laws in one test: it starts a process."""
    keep_environment(monkeypatch)
    model, lost = tiny_llama(tmp_path, VOCAB_SIZE), list[OutriderError]()
    config = config_of(model, attention_path="dense")
    runner, leader = load_split(config, lost.append, step_timeout=STEP_TIMEOUT)
    (rank_process,) = [process.pid for process in leader.processes]
    try:
        whole, ids = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), some_ids(9, VOCAB_SIZE, 1)
        truth = truth_of(whole)
        assert largest_error(runner, truth) < TOLERANCE
        assert runner.supports_trees and largest_tree_error(runner, truth) < TOLERANCE
        assert runner.features_refusal is None
        runner.set_taps([0, 1, 2, NORMED])
        table = runner.pool.new_table()
        runner.forward([Row.of(table, ids, 0, 1)])
        table.free()
        torch.testing.assert_close(runner.features, UncachedModel(whole).hidden_states(ids), atol=TOLERANCE, rtol=0.0)
        os.kill(rank_process, signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"2 ranks no longer work together.*Timed out"):
            runner.forward([Row.of(runner.pool.new_table(), [1, 2, 3], 0, 1)])
        assert len(lost) == 1 and runner.pool.num_in_use == 0
    finally:
        os.kill(rank_process, signal.SIGCONT)
        leader.close()
