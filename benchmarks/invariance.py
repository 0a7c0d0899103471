"""Check on real text, path by path, that the same tokens give the same bits in every batch and at every width.

    make bench-invariance                             # or: python -m benchmarks.invariance --help; part of bench-engine

A text is the model's own greedy continuation of a development prompt, one token a step, alone. Then the same text is
fed again in batches and in wider pieces. Where a greedy token differs, a served text would have gone another way from
there, so the texts with at least one such token are those that batch invariance would have kept.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, RESULTS, Report, dev_prompts, widened
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig

BATCHES, WIDTHS = (1, 4, 16), (1, 3, 9)
NUM_PROMPTS, PROMPT_TOKENS, TEXT_TOKENS = 24, 96, 63


@dataclass(frozen=True)
class Difference:
    """Difference of one shape from a batch of one, a token a step."""

    path: str
    dtype: str
    batch: int
    width: int
    largest: float
    """Largest difference of two logits."""
    positions: float
    """Share of positions with any bit of their logits different."""
    tokens: float
    """Share of positions whose best token differs."""
    texts: int
    """Texts with at least one such token."""


def differences(folder: Path, path: str, dtype: str, prompts: list[list[int]]) -> list[Difference]:
    """Return the differences of every shape. Raises ConfigError where the path cannot run."""
    runner = load_runner(
        TargetConfig(
            model=str(folder),
            device="cpu",
            dtype=dtype,
            kv_cache_tokens=max(BATCHES) * 256,
            max_slots=max(BATCHES),
            context_limit=None,
            attention_path=path,
        )
    )
    texts, alone = [], []
    for prompt in prompts:
        ids, logits = greedy(runner, prompt)
        texts.append(ids)
        alone.append(logits)
    truth = torch.stack(alone)  # [R, n, V] float32
    found = []
    for batch in BATCHES:
        for width in WIDTHS:
            logits = forced(runner, prompts, texts, batch, width)
            other = logits.argmax(-1) != truth.argmax(-1)  # [R, n] bool
            bits = (logits.view(torch.int32) != truth.view(torch.int32)).any(-1)  # [R, n] bool
            found.append(
                Difference(
                    path,
                    dtype,
                    batch,
                    width,
                    (logits - truth).abs().max().item(),
                    bits.float().mean().item(),
                    other.float().mean().item(),
                    int(other.any(-1).sum()),
                )
            )
    return found


def greedy(runner: ModelRunner, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Return the next TEXT_TOKENS ids, and the logits [n, V] float32 that chose them."""
    table, ids, rows = runner.pool.new_table(), list(prompt), []
    runner.forward([Row.of(table, ids[:-1], 0, 0)])
    for _ in range(TEXT_TOKENS):
        logits = runner.forward([Row.of(table, list(ids), len(ids) - 1, 1)])
        rows.append(logits[0].clone())
        ids.append(int(logits[0].argmax()))
    table.free()
    return ids[len(prompt) :], torch.stack(rows)


def forced(runner: ModelRunner, prompts: list[list[int]], texts: list[list[int]], batch: int, width: int) -> Tensor:
    """Return the logits [R, n, V] float32 of the same texts in batches of `batch` rows and pieces of `width` tokens."""
    groups = []
    for start in range(0, len(prompts), batch):
        group = [prompt + text for prompt, text in zip(prompts, texts, strict=True)][start : start + batch]
        lengths = [len(prompt) for prompt in prompts[start : start + batch]]
        tables = [runner.pool.new_table() for _ in group]
        feeds = list(zip(tables, group, lengths, strict=True))
        runner.forward([Row.of(table, ids[: n - 1], 0, 0) for table, ids, n in feeds])
        pieces = []
        for done in range(0, TEXT_TOKENS, width):
            rows = [Row.of(table, ids[: n - 1 + done + width], n - 1 + done, width) for table, ids, n in feeds]
            pieces.append(runner.forward(rows).clone().view(len(group), width, -1))  # [B, width, V]
        groups.append(torch.cat(pieces, dim=1))
        for table in tables:
            table.free()
    return torch.cat(groups)


def add_invariance(report: Report, model: str, dtypes: list[str], paths: list[str]) -> None:
    """Add one row for each path and dtype, the worst over all shapes; the JSON file has every shape."""
    folder = {"draft": DEMO_DRAFT, "target": DEMO_TARGET}.get(model) or widened(model)
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(NUM_PROMPTS)]
    rows, everything = [], []
    for dtype in dtypes:
        for path in paths:
            try:
                found = differences(folder, path, dtype, prompts)
            except ConfigError as error:
                rows.append([f"{path}, {dtype}", "n/a", "", "", error.message])
                continue
            everything += found
            worst = [max(getattr(each, name) for each in found) for name in ("largest", "positions", "tokens", "texts")]
            cells = [f"{worst[0]:.1e}" if worst[0] else "0", *(f"{100 * share:.2f} %" for share in worst[1:3])]
            rows.append([f"{path}, {dtype}", *cells, f"{worst[3]} of {len(prompts)}"])
    report.table(
        f"Bits of logits over batch {BATCHES} and verify width {WIDTHS}, {model}, {len(prompts)} texts of "
        f"{TEXT_TOKENS} tokens, against a batch of one and one token a step; the worst shape",
        ("path", "largest difference", "positions with other bits", "other greedy token", "texts that differ"),
        rows,
    )
    report.data["invariance"] = [asdict(each) for each in everything]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="target", choices=["draft", "target", "94M", "111M", "1b"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--paths", nargs="+", default=["fused", "paged", "dense"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("invariance", "The same bits in every batch")
    report.text(f"{options.threads} thread(s). One row is one path; only one that promises it is served with the mode.")
    add_invariance(report, options.model, options.dtype, options.paths)
    report.write(options.results)


if __name__ == "__main__":
    main()
