"""Users of all kinds, in a thread: greedy and sampled, shared prefixes, slow readers, several answers, stop strings."""

import asyncio
import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence

from outrider.client import AsyncClient, DraftLogprobs, OutriderError, RetryPolicy, Speculation
from outrider.client.generate_options import GenerateOptions
from tests.forked import REPO
from tests.stack import NUM_DRAFT_TOKENS
from tests.watching.system import KEYS

K = int(NUM_DRAFT_TOKENS)
NAMED = Speculation(num_draft_tokens=K)
WISHES: tuple[GenerateOptions, ...] = (
    {"temperature": 0.0, "speculation": NAMED},
    {"temperature": 0.0, "speculation": NAMED, "stop": ["self", "\n\n"]},
    {"temperature": 0.8, "speculation": NAMED, "top_k": 40},
    {"temperature": 0.8, "speculation": Speculation(num_draft_tokens=K, draft_logprobs=DraftLogprobs.FULL)},
    {"temperature": 1.0, "speculation": Speculation(num_draft_tokens=K, draft_logprobs=DraftLogprobs.TOPK), "n": 2},
    {"temperature": 0.0, "speculation": Speculation(num_draft_tokens="auto")},
    {"temperature": 0.0, "speculation": False},
)
"""Most name how much is drafted: under the gateway's default, `auto`, the demo draft does not pay here, and hardly
anything would be verified."""
DEFAULTS: tuple[GenerateOptions, ...] = ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 40})
"""Of clients that say nothing of drafts."""
SLOW_S = 0.3
"""A slow reader's pause after each round."""


class Load:
    """`level` users, each asking for one thing after the other. Errors are counted: parts die under them on purpose.

    One user in six reads slowly, one has a key with a limit, and one who comes now and then has none.
    """

    def __init__(self, address: str, level: int, wishes: Sequence[GenerateOptions]) -> None:
        """`address`: the gateway's gRPC."""
        self.level = level
        self.wishes = wishes
        self.long = False
        """Prompts that fill KV caches."""
        self.ended: Counter[str] = Counter()
        self._address = address
        self._prompts = [json.loads(line)["prompt"] for line in (REPO / "tests/data/prompts.jsonl").open()]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(60)

    async def _run(self) -> None:
        visitor = asyncio.create_task(self._without_key())
        users: dict[int, asyncio.Task[None]] = {}
        while not self._stopping.is_set():
            for number in range(max(self.level, len(users))):
                if number >= self.level:
                    users.pop(number).cancel()
                elif number not in users or users[number].done():
                    users[number] = asyncio.create_task(self._user(number))
            await asyncio.sleep(0.1)
        for task in (visitor, *users.values()):
            task.cancel()
        await asyncio.gather(visitor, *users.values(), return_exceptions=True)

    async def _without_key(self) -> None:
        async with AsyncClient(self._address, retries=RetryPolicy(0)) as client:
            while True:
                with contextlib.suppress(OutriderError):
                    await client.generate("Hello", max_tokens=1, timeout_s=10)
                await asyncio.sleep(2)

    async def _user(self, number: int) -> None:
        dice = random.Random(number)
        key = KEYS["limited" if number % 6 == 4 else "free"]
        async with AsyncClient(self._address, api_key=key, retries=RetryPolicy(0)) as client:
            while True:
                try:
                    await self._ask(client, dice, slow=number % 6 == 5)
                    self.ended["ok"] += 1
                except OutriderError as error:
                    self.ended[type(error).__name__] += 1
                    await asyncio.sleep(0.2)

    async def _ask(self, client: AsyncClient, dice: random.Random, slow: bool) -> None:
        length = 1400 if self.long else dice.choice((100, 300))
        options: GenerateOptions = {
            **dice.choice(self.wishes),
            "max_tokens": 300 if self.long else 48,
            "ignore_eos": True,
        }
        if self.long:
            options["n"] = 1
        async with client.stream(dice.choice(self._prompts)[:length], timeout_s=60, **options) as rounds:
            async for _ in rounds:
                if slow:
                    await asyncio.sleep(SLOW_S)
