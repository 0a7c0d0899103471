"""A target split over two processes says what it says in one, and ends as a whole however it ends."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.client import Choice, Client, Speculation
from tests.e2e.reference import assert_target_alone
from tests.stack import DEMO_TARGET, Process, Stack, running
from tests.waiting import wait_until

SPLIT = ("--tensor-parallel", "2", "--device", "cpu")
MAX_TOKENS = 24
END_S = 30.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(target_args=SPLIT, log_folder=tmp_path_factory.mktemp("split")) as stack:
        assert len(other_ranks(stack.target.pid)) == 1
        yield stack


def answer(stack: Stack, prompt: str, num_draft_tokens: int) -> Choice:
    with Client(stack.grpc) as client:
        made = client.generate(
            prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            num_logprobs=1,
            speculation=Speculation(num_draft_tokens=num_draft_tokens),
        )
    return made.choices[0]


def ids_of(choice: Choice) -> list[int]:
    return [token.id for token in choice.tokens]


def test_the_tokens_are_those_of_the_whole_model(split: Stack, dev_prompts: list[str]) -> None:
    """Several at once, so that rows of different widths share a step."""
    assert split.target_info().tensor_parallel == 2
    asked = [(prompt, num_draft_tokens) for prompt in dev_prompts[:3] for num_draft_tokens in (0, 4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda ask: ids_of(answer(split, *ask)), asked))
    assert_target_alone(DEMO_TARGET, *zip([prompt for prompt, _ in asked], found, strict=True))


def test_a_lost_rank_takes_the_worker_down_with_a_reason(split: Stack) -> None:
    """After the tests that need both."""
    found = other_ranks(split.target.pid)
    folder = folder_of(found[0])
    os.kill(found[0], signal.SIGKILL)
    assert split.target.popen.wait(END_S) == 1
    assert "the engine ended: rank 1 of 2 is lost, its process has ended" in split.target.log()
    assert ranks_gone(found) and not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_nothing_outlives_a_worker(how: str) -> None:
    worker = Process("target_service", ["--model", DEMO_TARGET, *SPLIT])
    try:
        found = other_ranks(worker.pid)
        folder = folder_of(found[0])
        assert folder.exists()
        if how == "stopped":
            assert worker.stop() == 0
        else:
            worker.kill()
        assert ranks_gone(found)
        wait_until(lambda: not folder.exists(), f"{folder} is left")
    finally:
        worker.stop()


def other_ranks(rank_0: int) -> list[int]:
    """Process ids."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            parent = re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())
        except OSError:  # ended meanwhile
            continue
        if parent and int(parent[1]) == rank_0 and b"outrider.engine.loading.rank_process" in command:
            found.append(int(entry.name))
    return found


def folder_of(rank_pid: int) -> Path:
    return Path(Path(f"/proc/{rank_pid}/cmdline").read_bytes().split(b"\0")[3].decode())


def ranks_gone(pids: list[int]) -> bool:
    wait_until(lambda: not any(_runs(pid) for pid in pids), f"ranks {pids} are left")
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
