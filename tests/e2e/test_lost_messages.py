"""One-way messages that never arrive: an answer pauses, and goes on as it would have."""

import asyncio
from collections.abc import Sequence
from typing import Any

from outrider.client import AsyncClient
from tests.e2e.reference import assert_target_alone
from tests.message_relay import MessageRelay, kind_of
from tests.stack import DEMO_TARGET, Process, Stack


async def test_an_answer_whose_extends_are_lost_goes_on_when_it_is_extended_again(
    stack: Stack, dev_prompts: list[str]
) -> None:
    """So many in a row that the target comes to its lease's end, and waits."""
    num_extends, num_tokens = 0, 400

    def lose(item: Any) -> Sequence[float]:
        nonlocal num_extends
        num_extends += kind_of(item) == "extend"
        return () if kind_of(item) == "extend" and num_extends < 4 else (0.0,)

    assert stack.draft is not None
    async with MessageRelay(stack.target.address, lose) as relay:
        args = ["--target", relay.address, "--draft", stack.draft.address, "--port", "0", "--grpc-port", "0"]
        args += ["--target-for-draft", stack.target.address]
        gateway = await asyncio.to_thread(Process, "gateway", args)
        try:
            async with AsyncClient(str(gateway.ready["grpc"])) as client:
                told = await client.generate(
                    dev_prompts[3][-200:], temperature=0.0, max_tokens=num_tokens, ignore_eos=True, speculation=False
                )
        finally:
            await asyncio.to_thread(gateway.stop)
    assert num_extends >= 4 and relay.num_held > 0
    ids = [token.id for token in told.choices[0].tokens]
    assert len(ids) == num_tokens
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (dev_prompts[3][-200:], ids))
