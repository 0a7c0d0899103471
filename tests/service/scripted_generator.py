"""A Generator that plays back a given text in rounds of three tokens, through the real tokenizer and detokeniser.

It stands in for the workers only: the front ends, the tokenizer and the servers around it are the product's own.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.generation import (
    ChoiceUsage,
    FinishReason,
    GenerationRequest,
    OutputLogprobs,
    OutputTimings,
    OutputToken,
    RoundOutput,
    ServedFacts,
)
from gateway.rounds.detokenizer import TextUpdate, detokenizer_of
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import OutriderError
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.log import TextFormatter
from tests.rendering import inline_template

DEMO = Path(__file__).parents[2] / "models/demo/target"
CONTEXT_LIMIT = 2048
ROUND = (TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.RECOVERED)
NUM_DRAFTED = 5
TIMINGS = OutputTimings(0.004, 0.0015, 0.002, 0.0005)


def demo_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_files(
        pb.TokenizerFiles(
            tokenizer_json=(DEMO / "tokenizer.json").read_bytes(),
            tokenizer_config_json=(DEMO / "tokenizer_config.json").read_bytes(),
        )
    )
    source = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.template = inline_template(source, tokenizer.special_tokens)
    return tokenizer


def config(**changes: object) -> GatewayConfig:
    """Settings of a gateway that tests call as http://gateway, and schemathesis as http://testserver."""
    return GatewayConfig(target="127.0.0.1:1", **{"allowed_hosts": "gateway,testserver", **changes})


MAX_ANSWERS = config().max_running + config().max_queue


class Panic(BaseException):
    """Stands for a panic of compiled code, which is no Exception either."""


def _set_event() -> asyncio.Event:
    made = asyncio.Event()
    made.set()
    return made


@dataclass
class ScriptedGenerator:
    """Answers every request with `text`, or `text` + str(choice) when `numbered`."""

    own_tokenizer: Tokenizer
    text: str = "the quick brown fox"
    model_ids: tuple[str, ...] = ("models/demo/target",)
    numbered: bool = False
    num_cached: int = 0
    """Prompt tokens that choice 0 finds in the cache; each later one finds one more."""
    reason: str | None = None
    """Why it is not ready."""
    refusal: OutriderError | None = None
    """Raised by admit."""
    fail_at: tuple[int, BaseException] | None = None
    """(round, error) of every answer."""
    pause_at: int | None = None
    """Round before which every answer waits until `go_on`."""
    requests: list[GenerationRequest] = field(default_factory=list)
    num_open: int = 0
    opens: asyncio.Event = field(default_factory=_set_event)
    """Set while a target opens slots."""
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    all_left: asyncio.Event = field(default_factory=asyncio.Event)

    def models(self) -> tuple[ServedFacts, ...]:
        vocab_size, created = self.own_tokenizer.vocab_size, 1_700_000_000
        drafters = (Drafter.MODEL,)
        return tuple(
            ServedFacts(name, CONTEXT_LIMIT, vocab_size, created, MAX_ANSWERS, "draft", drafters)
            for name in self.model_ids
        )

    def tokenizer(self, model_id: str) -> Tokenizer:
        return self.own_tokenizer

    def ready(self) -> str | None:
        return self.reason

    def refusals(self) -> list[str]:
        return ["a draft: why"]

    def admit(self, model_id: str, num_choices: int, caller: bytes = b"", weight: float = 1.0) -> "Playback":
        if self.refusal is not None:
            raise self.refusal
        return Playback(self)


@dataclass
class Playback:
    generator: ScriptedGenerator
    requests: tuple[GenerationRequest, ...] = ()
    num_output_tokens: int = 0

    async def __aenter__(self) -> "Playback":
        self.generator.num_open += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.generator.num_open -= 1
        if not self.generator.num_open:
            self.generator.all_left.set()

    def start(self, requests: tuple[GenerationRequest, ...]) -> None:
        self.requests = requests
        self.generator.requests.extend(requests)

    async def wait_opened(self) -> None:
        if self.generator.fail_at is not None and self.generator.fail_at[0] == 0:
            raise self.generator.fail_at[1]
        await self.generator.opens.wait()

    async def stream(self) -> AsyncIterator[tuple[int, RoundOutput]]:
        """Choices interleaved round by round, as a batch would give them."""
        answers = [rounds(self.generator, request) for request in self.requests]
        for number in range(max(map(len, answers))):
            await self._mishap(number)
            await asyncio.sleep(0)
            for index, answer in enumerate(answers):
                if number < len(answer):
                    self.num_output_tokens += len(answer[number].tokens)
                    yield index, answer[number]

    async def _mishap(self, number: int) -> None:
        if self.generator.fail_at is not None and self.generator.fail_at[0] == number:
            raise self.generator.fail_at[1]
        if self.generator.pause_at == number:
            self.generator.paused.set()
            await self.generator.go_on.wait()


def rounds(generator: ScriptedGenerator, request: GenerationRequest) -> list[RoundOutput]:
    tokenizer = generator.own_tokenizer
    text = generator.text + (str(request.params.choice) if generator.numbered else "")
    ids = tokenizer.encode(text)[: request.params.max_tokens]
    short = len(ids) == request.params.max_tokens
    detokenizer = detokenizer_of(request, tokenizer)
    usage = ChoiceUsage(num_prompt_tokens=len(request.prompt_ids), seed=request.params.seed)
    usage.num_cached_prompt_tokens = generator.num_cached + request.params.choice
    outputs: list[RoundOutput] = []
    for start in range(0, len(ids), len(ROUND)):
        chunk = ids[start : start + len(ROUND)]
        pushed = detokenizer.push(chunk)
        usage.num_completion_tokens += 0 if request.is_empty else pushed.num_kept
        usage.num_rounds += 1
        usage.num_draft_tokens += NUM_DRAFTED
        usage.num_accepted_tokens += len(ROUND) - 1
        last = pushed.stop is not None or start + len(ROUND) >= len(ids)
        finish = None if not last else FinishReason.LENGTH if short and not pushed.stop else FinishReason.STOP
        tail = detokenizer.finish()[0] if last else ""
        outputs.append(
            RoundOutput(
                tokens=() if request.is_empty else _tokens(request, chunk, pushed),
                text_delta="" if request.is_empty else pushed.text_delta + tail,
                num_drafted=NUM_DRAFTED,
                num_accepted=len(ROUND) - 1,
                timings=TIMINGS,
                finish_reason=finish,
                stop_reason=pushed.stop,
                usage=usage if last else None,
                prompt_logprobs=None if outputs else _prompt_logprobs(request),
            )
        )
        if last:
            break
    return outputs


def _prompt_logprobs(request: GenerationRequest) -> tuple[pb.TokenLogprobs, ...] | None:
    """Of the second token -0.25, of the third -0.5, ...; its neighbour is likelier."""
    wanted = request.num_prompt_logprobs
    if wanted is None:
        return None
    ids = request.prompt_ids[1:]
    return tuple(
        pb.TokenLogprobs(
            logprob=-0.25 * at,
            top_ids=(token_id + 1, token_id)[:wanted],
            top_logprobs=(-0.125, -0.25 * at)[:wanted],
            rank=2,
        )
        for at, token_id in enumerate(ids, 1)
    )


def _tokens(request: GenerationRequest, ids: list[int], pushed: TextUpdate) -> tuple[OutputToken, ...]:
    """Log-probs are made up, but tell apart: of the chosen id -0.5, of its neighbours -1, -2, ..., the last -inf."""
    wanted = request.params.num_logprobs
    tokens = []
    for kind, token_id, (text, offset) in zip(ROUND, ids, pushed.tokens, strict=False):
        logprobs = None
        if wanted is not None:
            top = [(token_id, -0.5), *((token_id + rank, -float(rank)) for rank in range(1, wanted))][:wanted]
            logprobs = OutputLogprobs(-0.5, tuple([*top[:-1], (top[-1][0], float("-inf"))] if wanted > 1 else top))
        tokens.append(OutputToken(token_id, kind, text, offset, logprobs))
    return tuple(tokens)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """Return what the gateway's own log has of the captured records."""
    formatter = TextFormatter("gateway")
    return "\n".join(map(formatter.format, caplog.records))
