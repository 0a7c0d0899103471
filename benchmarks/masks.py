"""What a grammar's masks cost by vocabulary, along random outputs of ten schemas: 4,096 and 262,144 tokens.

    make bench-masks                                  # or: python -m benchmarks.masks --help

`make bench-structured` compares the speed of answers with a schema and without.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from benchmarks.common import DEMO_TARGET, Report, parser
from gateway.grammars import create_schema_grammar
from outrider.engine.sampling.grammar_state import Grammars, GrammarState

SMALL, LARGE = 4096, 262_144
MAX_OUTPUT = 96
"""Tokens of a random output along which masks are timed."""


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
    texts = [create_schema_grammar(dict(schema), "schema", strict=False) for schema in SCHEMAS.values()]
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
        while len(output) < MAX_OUTPUT and output[-1:] != [eos_token_id]:
            began = time.perf_counter()
            state.set_output(output)
            mask = state.allowed(())
            times.token_us.append(1e6 * (time.perf_counter() - began))
            assert mask is not None, "the output is of the grammar"
            output.append(int(chance.choice(np.flatnonzero(mask))))
    return times


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("masks", "What a grammar's masks cost")
    demo = (DEMO_TARGET / "tokenizer.json").read_text()
    eos_id = json.loads((DEMO_TARGET / "config.json").read_text())["eos_token_id"]
    rows = list[list[str]]()
    for tokenizer_json, size, end_id in ((demo, SMALL, eos_id), (made_up_tokenizer(LARGE), LARGE, 0)):
        times = mask_times(tokenizer_json, size, end_id)
        us = sorted(times.token_us)
        row = [str(size), f"{times.tokenizer_ms:.0f}", f"{statistics.median(times.compile_ms):.1f}"]
        row += [f"{statistics.mean(us):.0f}", f"{statistics.median(us):.0f}", f"{us[int(0.99 * len(us))]:.0f}"]
        rows.append(row)
    columns = ["vocabulary", "tokenizer, ms", "compile, ms", "a token, us: mean", "median", "p99"]
    report.table("Masks, along random outputs of ten schemas", columns, rows)
    report.write(options.results)


if __name__ == "__main__":
    main()
