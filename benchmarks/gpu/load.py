"""Section `load`: the demo target on each attention path, with its self-test and one answer beside transformers'."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmarks.gpu.bench import DEMO_TARGET, Bench
from benchmarks.gpu.services import PROMPTS, Answer
from outrider.engine.loading.attention_choice import FACTORIES, describe_self_test
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.lab.models.reference_generate import Generated, Reference
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig

NEAR_TIE = 0.05
"""Gap of the two best logits, in nats, within which bfloat16 may choose the other one."""
ON_CARD_PATHS = tuple(name for name in FACTORIES if name != "fused")
"""`fused` runs on processors alone."""


def run(bench: Bench) -> None:
    num_tokens = bench.size(48, 8)
    expected = Reference(str(DEMO_TARGET)).generate(PROMPTS[0], num_tokens)
    num_served = num_tried = 0
    paths = ON_CARD_PATHS if bench.on_card else ("fused", "paged", "dense")
    for path in paths:
        dtypes = ("bfloat16",) if bench.rehearse else ("bfloat16", "float16", "float32")
        for dtype in dtypes:
            num_tried += 1
            num_served += _tried(bench, path, dtype, expected)
    _tried(bench, "auto", "auto", expected)
    bench.sum_up(f"{num_served} of {num_tried} paths x dtypes serve")


def _tried(bench: Bench, path: str, dtype: str, expected: Generated) -> bool:
    try:
        return _load(bench, path, dtype, expected)
    except Exception as error:  # one path that fails leaves the others
        bench.find(f"the path {path} in {dtype}: {type(error).__name__}: {error}")
        return False


def _load(bench: Bench, path: str, dtype: str, expected: Generated) -> bool:
    """Load one path, compare its answer and return whether it serves."""
    began_s = time.monotonic()
    config = TargetConfig(
        model=str(DEMO_TARGET),
        device=bench.device,
        dtype=dtype,  # type: ignore[arg-type]
        attention_path=path,  # type: ignore[arg-type]
        kv_cache_tokens=4096,
        max_slots=4,
    )
    try:
        runner = load_runner(config)
    except ConfigError as error:
        bench.tell("path", path=path, dtype=dtype, outcome=f"refused: {error.message}")
        if path == "paged" or path == "auto":
            bench.find(f"the path {path} in {dtype} is refused: {error.message}")
        return False
    load_s = time.monotonic() - began_s
    differing = difference(greedy(runner, expected.prompt_ids, len(expected.ids)), expected)
    bench.tell(
        "path",
        path=runner.path.name if path == "auto" else path,
        dtype=runner.facts.dtype,
        outcome="default" if path == "auto" else "serves",
        load_s=load_s,
        self_test=describe_self_test(runner),
        trees=runner.tree_refusal or "run",
        features=runner.features_refusal or "given",
        answer=differing or "the same",
    )
    if differing is not None and not differing.startswith("near tie"):
        bench.find(f"the path {path} in {dtype} answers otherwise than transformers in float32: {differing}")
    del runner
    if bench.on_card:
        torch.cuda.empty_cache()
    return True


def greedy(runner: ModelRunner, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the runner's own greedy answer."""
    table, ids, num_cached = runner.pool.new_table(), list(prompt_ids), 0
    while len(ids) < len(prompt_ids) + num_tokens:
        logits = runner.forward([Row.of(table, ids, num_cached, 1)])  # [1, V]
        num_cached = len(ids)
        ids.append(int(logits[0].argmax()))
    table.free()
    return ids[len(prompt_ids) :]


def difference(ids: Sequence[int], expected: Generated) -> str | None:
    """Return where an answer leaves the expected one, which begins with "near tie" where it may; None where it does
    not.
    """
    for place, (own, other) in enumerate(zip(ids, expected.ids, strict=False)):
        if own != other:
            gap = expected.gaps[place]
            word = "near tie" if gap < NEAR_TIE else "DIFFERS"
            return f"{word} at token {place}: {own} for {other}, gap {gap:.3f}"
    return None


def is_well(bench: Bench, name: str, answer: Answer, expected: Generated, *, needs_drafts: bool) -> bool:
    """Return whether an answer is the expected one, with drafts where it needs some; report where it is not."""
    differing = difference(answer.ids, expected)
    is_same = differing is None or differing.startswith("near tie")
    has_drafts = bool(answer.usage.num_draft_tokens) or not needs_drafts
    if not is_same:
        bench.find(f"{name}: {differing}")
    if not has_drafts:
        bench.find(f"{name}: nothing was drafted")
    return is_same and has_drafts
