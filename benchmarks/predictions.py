"""Measure predicted outputs on edits of files of this repository, beside plain decoding, `lookup` and the draft model.

    make bench-predictions                            # or: python -m benchmarks.predictions --help

The demo target is asked for nothing: what it writes at temperature 0 after a file's beginning is the answer, and each
kind of edit of that text is a prediction of it: they differ as a file does before and after an edit. One of random
tokens says what a prediction of no use costs. Each file is gone on with by every arm in turn before the next one, in
another order each time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from benchmarks.arms import Cell, per_pass, speed
from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, REPO, Report, parser, widened
from benchmarks.passes import in_turn, run_pass
from benchmarks.running import running
from outrider.client import AsyncClient, Drafter, Speculation

PLAIN, LOOKUP, MODEL, USELESS = "plain", "lookup", "model", "random tokens"
FILES = (
    "outrider/drafting/lookup.py",
    "gateway/rounds/session.py",
    "target_service/leases/leases.py",
    "gateway/admission/queue.py",
    "outrider/engine/kv_pool.py",
    "outrider/wire/errors.py",
    "deploy/placement.py",
    "tests/unit/gateway/rounds/test_session.py",
)
PROMPT_TOKENS = 256
LINES = 8
"""Lines of a text from one that is put in, or left out, to the next."""
LEAST_RATIO = 0.97
"""Of plain decoding's speed, below which a prediction of no use must not lie with its whole interval."""


def renamed(text: str) -> str:
    """Return the text with its most common name changed."""
    names = Counter(re.findall(r"\b[A-Za-z_]{3,}\b", text)).most_common(1)
    return re.sub(rf"\b{names[0][0]}\b", "renamed_here", text) if names else text


def inserted(text: str) -> str:
    lines = text.split("\n")
    new = "    number = compute(another_argument, 17)"
    return "\n".join(line if i % LINES else f"{line}\n{new}" for i, line in enumerate(lines, start=1))


def deleted(text: str) -> str:
    return "\n".join(line for i, line in enumerate(text.split("\n"), start=1) if i % LINES)


def reordered(text: str) -> str:
    """Return the text with its halves swapped."""
    lines = text.split("\n")
    return "\n".join([*lines[len(lines) // 2 :], *lines[: len(lines) // 2]])


EDITS: Mapping[str, Callable[[str], str]] = {
    "no edit": lambda text: text,
    "rename": renamed,
    "insertion": inserted,
    "deletion": deleted,
    "reordering": reordered,
}
DRAFTERS = (Drafter.PREDICTION, Drafter.PREDICTION_MODEL)


def arms() -> dict[str, Speculation]:
    """Return arms by name: of predictions, each kind with the prediction alone and with the model beside it."""
    found = {PLAIN: Speculation(enabled=False)}
    found |= {name: Speculation(drafter=Drafter(name)) for name in (LOOKUP, MODEL)}
    for kind in (*EDITS, USELESS):
        found |= {f"{kind}, {drafter}": Speculation(drafter=drafter) for drafter in DRAFTERS}
    return found


async def answers(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return what the target alone writes after each prompt."""
    async with AsyncClient(address) as client:
        return (
            await run_pass(client, prompts, concurrency=4, temperature=0.0, max_tokens=max_tokens, speculation=False)
        ).outputs


def predicted(tokenizer: Tokenizer, outputs: Sequence[Sequence[int]]) -> dict[str, list[str]]:
    """Return the predictions of each answer by arm."""
    dice, texts = random.Random(0), [tokenizer.decode(ids) for ids in outputs]
    special = tokenizer.get_added_tokens_decoder()
    known = [token_id for token_id in range(tokenizer.get_vocab_size()) if token_id not in special]
    kinds = {kind: [edit(text) for text in texts] for kind, edit in EDITS.items()}
    kinds[USELESS] = [tokenizer.decode(dice.choices(known, k=len(ids))) for ids in outputs]
    return {f"{kind}, {drafter}": each for kind, each in kinds.items() for drafter in DRAFTERS}


def compare(report: Report, cells: Mapping[str, Cell]) -> list[str]:
    """Add the table. Fail where a prediction of no use is slower than plain decoding."""
    rows, wrong = list[list[str]](), list[str]()
    for name, cell in cells.items():
        over = {base: cell.over(cells[base], speed) for base in (PLAIN, LOOKUP) if base != name}
        rows.append([*cell.row, *(str(over.get(base, "")) for base in (PLAIN, LOOKUP))])
        if name.startswith(USELESS) and over[PLAIN].high < LEAST_RATIO:
            wrong.append(f"{name}: {over[PLAIN]} of plain, at least {LEAST_RATIO:g} wanted")
    columns = ("arm", "drafted a pass", "kept", "tokens a pass", "tok/s", "speed over plain", "speed over lookup")
    report.table("Predictions at temperature 0", columns, rows)
    report.data["samples"] = {name: cell.data(per_pass, speed) for name, cell in cells.items()}
    return wrong


def same(cells: Mapping[str, Cell]) -> str:
    """Return how many answers are not, to the token, what plain decoding gave."""
    pairs = [
        (own.outputs, plain.outputs)
        for cell in cells.values()
        for one, other in zip(cell.by_prompt, cells[PLAIN].by_prompt, strict=True)
        for own, plain in zip(one, other, strict=True)
    ]
    num_other = int(np.sum([own != plain for own, plain in pairs]))
    return f"{num_other} of {len(pairs)} answers differ from what plain decoding gave."


def measure(report: Report, address: str, options: argparse.Namespace) -> list[str]:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    texts = [(REPO / name).read_text(encoding="utf-8") for name in FILES[: options.prompts]]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids[:PROMPT_TOKENS] for text in texts]
    outputs = asyncio.run(answers(address, prompts, options.max_tokens))
    samples = asyncio.run(
        in_turn(
            address,
            prompts,
            arms(),
            temperature=0.0,
            max_tokens=options.max_tokens,
            repetitions=options.repetitions,
            predictions=predicted(tokenizer, outputs),
        )
    )
    cells = {name: Cell(name, each) for name, each in samples.items()}
    wrong = compare(report, cells)
    report.text(same(cells))
    return wrong


def main() -> int:
    made = parser(__doc__, size="94M", dtype="float32", prompts=len(FILES), max_tokens=192, repetitions=3)
    options = made.parse_args()
    common = {"dtype": options.dtype, "prefix_caching": False}
    report = Report("predictions", "Predicted outputs")
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, {options.dtype}, placed as `outrider up` places it; "
        f"{options.prompts} files, {options.max_tokens} tokens each, one answer at a time, {options.repetitions} "
        "repetitions. In brackets the interval of 95 % from a bootstrap over files."
    )
    with running(
        {"model": str(widened(options.size, options.dtype)), **common}, {"model": str(DEMO_DRAFT), **common}
    ) as endpoints:
        wrong = measure(report, endpoints.grpc, options)
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
