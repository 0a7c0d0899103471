"""What a grammar costs and what its forced tokens bring: masks by vocabulary, speed with a schema over without.

    make bench-structured                             # or: python -m benchmarks.structured --help

Masks are timed on their own, along random outputs of ten schemas, with the demo tokenizer and with a made-up one of
262,144 tokens. Then the demo pair, its target widened, answers with the schemas: target and draft have a core each, and
beside them runs a target that proposes nothing of what a grammar leaves no choice of. Arms take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, Report, dev_prompts, parser, spread, widened, with_interval
from benchmarks.overlap.checkouts import this_checkout
from benchmarks.overlap.systems import Front, split
from benchmarks.passes import Sample, run_pass
from gateway.grammars import of_schema
from outrider.client import Speculation, StructuredOutputs
from outrider.engine.sampling.grammar import Grammars, GrammarState

SMALL, LARGE = 4096, 262_144
MOST_OUTPUT = 96
"""Tokens of a random output along which masks are timed."""
NUM_STREAMS = (1, 16)
PLAIN, AUTO, ALONE = "plain", "auto", "no draft worker"
ARMS: Mapping[str, Speculation] = {
    PLAIN: Speculation(enabled=False),
    AUTO: Speculation(num_draft_tokens="auto"),
    ALONE: Speculation(num_draft_tokens="auto", drafter="lookup"),
}
"""Of the last, `lookup` has little to say in short answers."""


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, NUMBER = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 9999}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "weather": _object(kind={"const": "weather_report"}, city=TEXT, temperature=NUMBER, unit={"enum": ["C", "F"]}),
    "person": _object(first_name=TEXT, last_name=TEXT, age=NUMBER),
    "call": _object(name={"const": "get_current_weather"}, arguments=_object(location=TEXT, days=NUMBER)),
    "flags": _object(is_open={"type": "boolean"}, is_paid={"type": "boolean"}, is_late={"type": "boolean"}),
    "choice": _object(sentiment={"enum": ["positive", "negative", "neutral"]}),
    "nested": _object(order=_object(id=NUMBER, customer=_object(name=TEXT, address=_object(street=TEXT)))),
    "list": _object(items={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 6}),
    "rows": _object(
        rows={"type": "array", "items": _object(identifier=NUMBER, description=TEXT), "minItems": 1, "maxItems": 3}
    ),
    "either": _object(result={"anyOf": [_object(error_message=TEXT), _object(value=NUMBER)]}),
    "date": _object(starts_at={"type": "string", "format": "date"}, ends_at={"type": "string", "format": "date"}),
}
ALL = "all"
ENDLESS = _object(numbers={"type": "array", "items": NUMBER, "minItems": 500, "maxItems": 600})
"""No answer to it ends before its most tokens."""


def made_up_tokenizer(vocab_size: int) -> str:
    """Return a tokenizer.json of single bytes and random words: for masks, which look at nothing but tokens' bytes."""
    letters, chance = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    words = dict.fromkeys(["<|end|>", *letters])
    while len(words) < vocab_size:
        word = "".join(chance.choices("etaoinshrdlucmfwypvbgkjqxz0123456789_", k=chance.randint(2, 9)))
        words[chance.choice(["", "", "Ġ", '"', "{", ":", ","]) + word] = None
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return str(made.to_str())


@dataclass(frozen=True)
class MaskTimes:
    """Of one vocabulary."""

    tokenizer_ms: float
    """To read the tokenizer, once."""
    compile_ms: list[float]
    token_us: list[float]
    """To go on behind a token and to make the mask after it."""


def mask_times(tokenizer_json: str, vocab_size: int, eos_token_id: int) -> MaskTimes:
    """Time masks along random outputs: of each, tokens drawn evenly from what is allowed."""
    texts = [of_schema(dict(schema), "schema", strict=False) for schema in SCHEMAS.values()]
    chance = np.random.default_rng(0)
    began = time.perf_counter()
    grammars = Grammars(tokenizer_json.encode(), vocab_size, [eos_token_id])
    times = MaskTimes(1e3 * (time.perf_counter() - began), [], [])
    for text in texts:
        began = time.perf_counter()
        grammar = grammars.compile(text)
        times.compile_ms.append(1e3 * (time.perf_counter() - began))
        assert grammar is not None, "this tokenizer can be followed"
        state, output = GrammarState(grammar), list[int]()
        while len(output) < MOST_OUTPUT and output[-1:] != [eos_token_id]:
            began = time.perf_counter()
            state.set_output(output)
            mask = state.allowed(())
            times.token_us.append(1e6 * (time.perf_counter() - began))
            assert mask is not None, "the output is of the grammar"
            output.append(int(chance.choice(np.flatnonzero(mask))))
    return times


async def answered(
    front: Front, arm: str, schema: Mapping[str, Any] | None, options: argparse.Namespace, seed: int, num: int = 1
) -> Sample:
    """Answer num prompts at once; None: without a schema."""
    return await run_pass(
        front.client,
        dev_prompts(num),
        concurrency=num,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        speculation=ARMS[arm],
        seed=seed,
        structured_outputs=None if schema is None else StructuredOutputs(json=schema),
    )


async def measured(report: Report, options: argparse.Namespace) -> None:
    """Run both systems, and write what they did."""
    target = widened(options.size)
    async with contextlib.AsyncExitStack() as stack:
        fronts = {
            name: (await stack.enter_async_context(split(this_checkout(), target, DEMO_DRAFT, module))).near
            for name, module in (("forced", "target_service"), ("not", "benchmarks.unforced_target"))
        }
        for front, schema in ((front, schema) for front in fronts.values() for schema in (None, *SCHEMAS.values())):
            await answered(front, AUTO, schema, options, 0)  # warms
        ratios: dict[tuple[int, str], list[tuple[Sample, Sample]]] = {}
        forced: dict[tuple[str, str], list[tuple[Sample, Sample]]] = {}
        for repetition in range(options.repetitions):
            for num, arm in ((num, arm) for num in NUM_STREAMS for arm in (PLAIN, AUTO)):
                pair = [
                    await answered(fronts["forced"], arm, each, options, repetition, num) for each in (ENDLESS, None)
                ]
                ratios.setdefault((num, arm), []).append((pair[0], pair[1]))
            for name, arm in ((name, arm) for name in SCHEMAS for arm in (AUTO, ALONE)):
                made = [await answered(front, arm, SCHEMAS[name], options, repetition) for front in fronts.values()]
                forced.setdefault((name, arm), []).append((made[0], made[1]))
    report.table(
        "Speed with a schema that ends no answer, over without",
        ["streams", "drafts", "with, tok/s", "without, tok/s", "ratio", "tokens a pass: with", "without"],
        [
            [
                str(num),
                arm,
                spread([a.tokens_per_s for a, _ in pairs]),
                spread([b.tokens_per_s for _, b in pairs]),
                _ratio([a.tokens_per_s / b.tokens_per_s for a, b in pairs]),
                f"{_a_pass([a for a, _ in pairs]):.2f}",
                f"{_a_pass([b for _, b in pairs]):.2f}",
            ]
            for (num, arm), pairs in ratios.items()
        ],
    )
    for arm in (AUTO, ALONE):
        forced[ALL, arm] = [pair for name in SCHEMAS for pair in forced[name, arm]]
    report.table(
        "Forced tokens: one answer at a time, tokens a pass and speed over where they are not proposed",
        ["schema", *(f"{arm}: {column}" for arm in (AUTO, ALONE) for column in ("forced", "not", "speed"))],
        [[name, *_compared(forced[name, AUTO]), *_compared(forced[name, ALONE])] for name in (*SCHEMAS, ALL)],
    )


def _compared(pairs: Sequence[tuple[Sample, Sample]]) -> list[str]:
    with_forced, without = [a for a, _ in pairs], [b for _, b in pairs]
    speed = _ratio([a.tokens_per_s / b.tokens_per_s for a, b in pairs])
    return [f"{_a_pass(with_forced):.2f}", f"{_a_pass(without):.2f}", speed]


def _a_pass(samples: Sequence[Sample]) -> float:
    return sum(each.num_tokens for each in samples) / sum(len(each.rounds) for each in samples)


def _ratio(values: Sequence[float]) -> str:
    mean, low, high = with_interval(values)
    return f"{mean:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    made = parser(__doc__, size="94M", max_tokens=64, repetitions=4)
    made.add_argument("--temperature", type=float, default=0.0)
    options = made.parse_args()
    report = Report("structured", "Structured output: what it costs and what forced tokens bring")
    demo = (DEMO_TARGET / "tokenizer.json").read_text()
    eos = json.loads((DEMO_TARGET / "config.json").read_text())["eos_token_id"]
    rows = list[list[str]]()
    for tokenizer_json, size, end in ((demo, SMALL, eos), (made_up_tokenizer(LARGE), LARGE, 0)):
        times = mask_times(tokenizer_json, size, end)
        us = sorted(times.token_us)
        rows.append(
            [
                str(size),
                f"{times.tokenizer_ms:.0f}",
                f"{statistics.median(times.compile_ms):.1f}",
                f"{statistics.mean(us):.0f}",
                f"{statistics.median(us):.0f}",
                f"{us[int(0.99 * len(us))]:.0f}",
            ]
        )
    report.table(
        "Masks, along random outputs of ten schemas",
        ["vocabulary", "tokenizer, ms", "compile, ms", "a token, us: mean", "median", "p99"],
        rows,
    )
    asyncio.run(measured(report, options))
    report.write(options.results)


if __name__ == "__main__":
    main()
