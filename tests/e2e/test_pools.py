"""Two targets and two drafts behind one gateway: workers die and hang in mid-stream; no token is lost or repeated."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from outrider.client import AsyncClient, Client, Drafter
from tests.e2e.scripted_registry import ScriptedRegistry
from tests.e2e.streams import PROMPT, Seen, greedy, speculative
from tests.samples import total
from tests.stack import Pools, Process, read_metrics, running_pools
from tests.waiting import until

NUM_TOKENS = 160
NOTICED_S = 15.0
"""A worker that hangs is given up within this, on a machine that does much else, too."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Targets that take 30 ms longer a step, so that streams outlive what is done to them."""
    folder = tmp_path_factory.mktemp("pools")
    invariant = ("--batch-invariant",)
    module = "tests.e2e.faults.paced_target"
    with running_pools(2, 2, target_args=invariant, target_module=module, log_folder=folder) as running:
        yield running


@pytest.fixture
async def client(pools: Pools) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pools.grpc()) as made:
        yield made


@pytest.fixture(scope="module")
def expected(pools: Pools) -> list[int]:
    """What the system says when it is left alone."""
    with Client(pools.grpc()) as client:
        answer = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [token.id for token in answer.choices[0].tokens]


def member_of(pools: Pools, role: str) -> tuple[str, Process]:
    """The one worker of this role that has a request now."""
    samples = pools.metrics()
    (name,) = (
        f"{role}-{index}" for index in range(2) if total(samples, "outrider_member_requests", member=f"{role}-{index}")
    )
    members = pools.targets if role == "target" else pools.drafts
    return name, members[int(name[-1])]


@pytest.mark.parametrize(
    ("number", "drafter"),
    [
        (signal.SIGKILL, Drafter.MODEL),
        pytest.param(signal.SIGSTOP, Drafter.MODEL, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, Drafter.NGRAM, marks=pytest.mark.slow),
    ],
)
async def test_a_stream_goes_on_at_the_other_target(
    pools: Pools, client: AsyncClient, expected: list[int], number: signal.Signals, drafter: Drafter
) -> None:
    seen = Seen()
    stream = greedy(client, NUM_TOKENS, drafter)
    await seen.read(stream, speculative(5))
    name, process = await asyncio.to_thread(member_of, pools, "target")
    process.popen.send_signal(number)
    hit_s = time.monotonic()
    try:
        await seen.read(stream, lambda rounds: False)
        now_at, _ = max(zip(seen.times_s, seen.times_s[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        assert seen.ids == expected
        assert max(b - a for a, b in zip(seen.times_s, seen.times_s[1:], strict=False)) < NOTICED_S
        assert hit_s - 1 < now_at < hit_s + 1, "the longest pause is the fault's"
        assert any(each.num_drafted for each in seen.rounds[-5:]), "drafts go to the other target"
        assert total(pools.metrics(), "outrider_retries_total", reason="lost") >= 1
    finally:
        process.popen.send_signal(signal.SIGCONT)
        if number is signal.SIGKILL:
            await asyncio.to_thread(pools.restart, process)
    await until(lambda: connected(pools.http(), name))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_drafts_go_on_with_the_other_draft(
    pools: Pools, client: AsyncClient, expected: list[int], number: signal.Signals
) -> None:
    seen = Seen()
    stream = greedy(client, NUM_TOKENS)
    await seen.read(stream, speculative(5))
    name, process = await asyncio.to_thread(member_of, pools, "draft")
    process.popen.send_signal(number)
    hit_s = time.monotonic()
    try:
        await seen.read(stream, speculative(5))
        assert time.monotonic() - hit_s < 4.0, "well before its connection is given up"
        await seen.read(stream, lambda rounds: False)
        assert seen.ids == expected
    finally:
        process.popen.send_signal(signal.SIGCONT)
        if number is signal.SIGKILL:
            await asyncio.to_thread(pools.restart, process)
    await until(lambda: connected(pools.http(), name))


async def test_a_registry_adds_drains_and_removes_members(pools: Pools, expected: list[int]) -> None:
    """One stream, while all that serves it is replaced."""
    (target_0, target_1), (draft_0, draft_1) = pools.targets, pools.drafts
    serving, draining = "serving", "draining"
    async with ScriptedRegistry(model_name="chat-model") as registry:
        registry.send_membership(
            target_0=(target_0, serving), draft_0=(draft_0, serving), draft_1=(draft_1, "starting")
        )
        args = ["--registry", registry.address, "--port", "0", "--grpc-port", "0"]
        gateway = await asyncio.to_thread(Process, "gateway", args)
        try:
            url, seen = f"http://{gateway.ready['http']}", Seen()

            def requests(member: str) -> float:
                return total(read_metrics(f"{url}/metrics"), "outrider_member_requests", member=member)

            async with AsyncClient(str(gateway.ready["grpc"])) as client:
                assert [model.id for model in await client.models()] == ["chat-model"]
                stream = greedy(client, NUM_TOKENS)
                await seen.read(stream, speculative(3))
                assert (requests("target_0"), requests("draft_0")) == (1, 1)
                registry.send_membership(
                    target_0=(target_0, draining), target_1=(target_1, serving), draft_0=(draft_0, serving)
                )
                await until(lambda: connected(url, "target_1"))
                other = await client.generate(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
                assert [token.id for token in other.choices[0].tokens] == expected[:40]
                assert requests("target_0") == 1, "what runs there goes on, and nothing new came"
                registry.send_membership(
                    target_0=(target_0, draining),
                    target_1=(target_1, serving),
                    draft_0=(draft_0, draining),
                    draft_1=(draft_1, serving),
                )
                await seen.read(stream, lambda rounds: requests("draft_1") == 1)
                assert requests("draft_0") == 0
                registry.send_membership(target_1=(target_1, serving), draft_1=(draft_1, serving))
                await seen.read(stream, lambda rounds: requests("target_1") == 1)
                await seen.read(stream, speculative(3))
                # it sees neither
                registry.send_membership(target_1=(target_1, "starting"), draft_1=(draft_1, "starting"))
                await seen.read(stream, speculative(3))
                assert (requests("target_1"), requests("draft_1")) == (1, 1), "their streams are up"
                await registry.stop()
                await seen.read(stream, lambda rounds: False)
                assert seen.ids == expected
                again = await client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
                assert [token.id for token in again.choices[0].tokens] == expected[:8], (
                    "the last membership is in force"
                )
            report = registry.reports[-1]
            assert [load.pool for load in report.pools] == ["chat"]
            assert any(load.num_running for each in registry.reports for load in each.pools)
        finally:
            await asyncio.to_thread(gateway.stop)


def connected(url: str, member: str) -> bool:
    return total(read_metrics(f"{url}/metrics"), "outrider_worker_connected", member=member) == 1
