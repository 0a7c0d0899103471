"""What `make coupled-parity` and `make bench-drafters` take for a fault, and how they count."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.common import DEMO_TARGET, REPO, Report
from benchmarks.coupled_parity import (
    FAR,
    IN_THE_TARGET,
    INVARIANT,
    KILLED,
    MODEL,
    MODES,
    NEAR_TIE,
    OFF,
    RANDOM,
    Flip,
    Judge,
    Killer,
    Outcome,
    Setting,
    add_outcomes,
    counted,
    half_way,
    violations,
    wanted,
)
from benchmarks.drafters import (
    DEV,
    LEAST_RATIO,
    PLAIN,
    REPETITIVE,
    Cell,
    Prompt,
    Ratio,
    add_cells,
    add_kinds,
    numbers_by_kind,
    of_all_kinds,
    read_prompts,
    repetitive_prompts,
)
from benchmarks.passes import Sample
from outrider.client import AcceptanceRule, Round, RoundTimings, Token, TokenKind
from outrider.engine.coupled import coupled_id
from outrider.engine.host_sampling import law_of
from outrider.engine.paths.dense import DensePath
from outrider.engine.paths.paged import PagedPath
from outrider.engine.reference_generate import Reference
from outrider.wire.params import SamplingParams
from tests.native import skip_without_library

GOOD = Outcome(Setting("ngram", 4, 8, 1.0), 24, 24 * 128, num_drafted=100, num_accepted=50, num_plain_steps=3, flips=[])


def flip(gap: float) -> Flip:
    return Flip(prompt=3, position=17, expected=5, found=6, gap=gap)


def test_any_difference_is_a_violation_where_batches_do_not_matter() -> None:
    assert violations(INVARIANT, [GOOD], None, 1e-3) == []
    found = violations(INVARIANT, [replace(GOOD, flips=[flip(0.0)])], None, 1e-3)
    assert len(found) == 1
    assert "prompt 3 differs at token 17" in found[0]


@pytest.mark.parametrize(("gap", "num"), [(0.1, 0), (0.2, 0), (0.3, 1), (math.inf, 1), (math.nan, 1)])
def test_elsewhere_a_near_tie_is_none(gap: float, num: int) -> None:
    assert len(violations("paged", [replace(GOOD, flips=[flip(gap)])], 0.2, 2.0)) == num


@pytest.mark.parametrize("times", [1.01, math.inf, math.nan])
@pytest.mark.parametrize("far", FAR.values())
def test_an_arithmetic_that_is_far_off_is_a_violation(far: float, times: float) -> None:
    assert violations("paged", [GOOD], far, far) == []
    assert "sums are moved by" in violations("paged", [GOOD], times * far, far)[0]


@pytest.mark.parametrize("forgiven", [None, 0.2])
def test_a_mode_is_told_with_its_flips_and_what_a_near_tie_is(forgiven: float | None) -> None:
    report = Report("x", "X", _machine={})
    add_outcomes(report, "paged", [replace(GOOD, flips=[flip(0.1)])], forgiven)
    told = "\n".join(report._parts)
    assert ("A near-tie is up to 0.2 nats wide." in told) == (forgiven is not None)
    assert "| ngram | 4 | 8 | 1 | 3 | 17 | 5 | 6 | 1.0e-01 |" in told
    assert report.data["paged"]["near_tie"] == forgiven


@pytest.mark.slow
def test_a_near_tie_is_as_wide_as_the_arithmetic_moves_two_sums() -> None:
    """What is forgiven is measured, of the texts themselves: far less in float32 than in bfloat16."""
    skip_without_library()  # the judge would compute on the path that is judged
    judge = Judge([[1, 20, 300, 40], [1, 7]])
    texts = {1.0: [[5, 286, 11, 15] * 6, [15, 17, 11] * 8]}
    settings: list[dict[str, object]] = [
        {"dtype": "float32"},
        {"dtype": "float32", "attention_path": "paged"},
        {"dtype": "bfloat16", "attention_path": "paged"},
    ]
    same, float32, bfloat16 = (judge.moved(each, texts) for each in settings)
    assert same == 0.0 < float32 < NEAR_TIE < bfloat16 < FAR["bfloat16"]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_a_target_says_has_no_gap_and_all_else_has_one(temperature: float) -> None:
    """By transformers' forward and our own draw of the answers to the second prompt, whose seed is 1."""
    prompts, before = [[7], [1, 20, 300, 40]], [5, 286]
    judge, ids = Judge(prompts), torch.tensor([[*prompts[1], *before]])
    with torch.no_grad():
        logits = Reference(str(DEMO_TARGET)).model(ids).logits[0, -1].numpy()
    params = SamplingParams(temperature=temperature, seed=1, acceptance=AcceptanceRule.COUPLED)
    said = coupled_id(law_of(logits, params), params, ids.shape[1])
    assert judge.gap(1, before, (said,), temperature) == 0.0
    others = {each: judge.gap(1, before, (each,), temperature) for each in range(64) if each != said}
    assert min(others.values()) > 0.0
    assert judge.gap(1, before, (said, 3, 9), temperature) == max(others[3], others[9])


def test_what_shows_nothing_is_a_violation() -> None:
    assert "nothing was drafted" in violations(INVARIANT, [replace(GOOD, num_drafted=0)], None, 1e-3)[0]
    assert "no draft was kept" in violations(INVARIANT, [replace(GOOD, num_accepted=0)], None, 1e-3)[0]
    random = replace(GOOD, setting=Setting(RANDOM, 8, 8, 1.0), num_accepted=0)
    off = replace(GOOD, setting=Setting(OFF, 0, 8, 1.0), num_drafted=0, num_accepted=0)
    assert violations(INVARIANT, [random, off], None, 1e-3) == []
    killed = replace(GOOD, setting=Setting(KILLED, 8, 8, 1.0), num_plain_steps=10 * GOOD.num_texts)
    assert violations(INVARIANT, [killed], None, 1e-3) == []
    ends = replace(killed, num_plain_steps=GOOD.num_texts)  # an answer's last token needs no draft
    assert "killed too late" in violations(INVARIANT, [ends], None, 1e-3)[0]


def test_everything_is_asked_for_where_nothing_may_differ() -> None:
    class Options:
        temperatures, k, concurrency = [0.7, 1.0], [1, 4, 8], [8, 1]

    settings = wanted(Options, INVARIANT)  # type: ignore[arg-type]
    assert len(settings) == len(set(settings))
    drafters = {MODEL, *IN_THE_TARGET, RANDOM, KILLED}
    for temperature in Options.temperatures:
        loaded = {(s.drafter, s.k) for s in settings if s.concurrency == 8 and s.temperature == temperature}
        assert loaded == {(OFF, 0), *itertools.product(drafters, (1, 4, 8))}
        alone = {(s.drafter, s.k) for s in settings if s.concurrency == 1 and s.temperature == temperature}
        assert alone == loaded - {(OFF, 0)}
    assert all(each.speculation.enabled == (each.drafter != OFF) for each in settings)
    for part in (wanted(Options, "paged"), wanted(Options, "dense")):  # type: ignore[arg-type]
        assert set(part) < set(settings)
        assert {(s.drafter, s.k) for s in part if s.concurrency == 1} == {
            (MODEL, 1),
            (MODEL, 4),
            (MODEL, 8),
            ("ngram", 8),
        }


def test_only_a_target_that_promises_nothing_stands_for_one() -> None:
    """`fused` keeps its sums' order without being asked to."""
    assert MODES[INVARIANT] == {"batch_invariant": True}
    assert {settings["attention_path"] for mode, settings in MODES.items() if mode != INVARIANT} == {"paged", "dense"}
    assert not PagedPath.batch_invariant and not DensePath.batch_invariant


def test_a_draft_dies_in_the_middle_of_a_text() -> None:
    assert half_way(24, 128) == 12 * 128 + 64
    assert half_way(3, 5) == 8


def test_flips_are_counted_with_the_tokens_that_were_compared() -> None:
    assert counted([GOOD, GOOD]) == "2 passes, 48 texts, 6144 tokens compared: no text differs."
    flipped = replace(GOOD, num_tokens=3000, flips=[flip(1e-5), replace(flip(3e-6), prompt=4)])
    again = replace(GOOD, num_tokens=3000, flips=[flip(1e-5)])
    assert counted([flipped, again]) == (
        "2 passes, 48 texts, 6000 tokens compared: 3 texts differ, first at 2 different places, where the two sums are "
        "3.0e-06 to 1.0e-05 nats apart."
    )


def made(num_tokens: int, num_drafted: int = 0, num_accepted: int = 0) -> Round:
    tokens = tuple(Token(i, TokenKind.PLAIN, "x") for i in range(num_tokens))
    return Round("r", 0, tokens, "x" * num_tokens, num_drafted, num_accepted, RoundTimings(0, 0, 0, 0, 0))


def test_a_process_is_killed_once_so_many_tokens_have_come() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        killer = Killer(process.pid, 5)
        killer.seen(made(4))
        assert not killer.done
        killer.seen(made(1))
        killer.seen(made(1))  # not a second time: the pid may be another's by now
        assert killer.done
        assert process.wait(10) == -signal.SIGKILL


def test_the_interval_of_a_ratio_draws_whole_prompts() -> None:
    same = Ratio.of([[1.5, 1.5]] * 24)
    assert (same.median, same.low, same.high) == (1.5, 1.5, 1.5)
    apart = Ratio.of([[1.0] * 10] * 12 + [[2.0] * 10] * 12)
    assert (apart.low, apart.high) == (1.0, 2.0)
    assert apart == Ratio.of([[1.0] * 10] * 12 + [[2.0] * 10] * 12)


def sample(elapsed_s: float, *rounds: Round) -> Sample:
    return Sample([[token.id for each in rounds for token in each.tokens]], list(rounds), elapsed_s)


def cell(elapsed_s: float, *rounds: Round) -> Cell:
    return Cell([[sample(elapsed_s, *rounds)]] * 3)


def test_cells_count_tokens_passes_and_drafts() -> None:
    one = cell(0.5, made(4, 5, 3), made(1), made(1, 3, 0))
    assert one.tokens_per_pass == 2.0
    assert one.share_kept == 3 / 8
    assert one.tokens_per_s == 12.0
    assert cell(0.5, made(1)).share_kept is None
    assert one.over(cell(1.0, made(3), made(3))).median == 2.0


def test_only_a_drafter_without_a_model_that_slows_held_out_text_is_a_violation() -> None:
    plain, slow = cell(1.0, made(6)), cell(1.0 / (LEAST_RATIO - 0.01), made(6))
    report = Report("x", "X", _machine={})
    assert len(add_cells(report, DEV, 0.0, {PLAIN: plain, "ngram": slow})) == 1
    assert add_cells(report, DEV, 0.0, {PLAIN: plain, "ngram": plain}) == []
    assert add_cells(report, DEV, 0.0, {PLAIN: plain, "model": slow}) == []


def test_and_one_that_gains_nothing_where_text_repeats_itself() -> None:
    plain, fast = cell(1.0, made(6)), cell(0.5, made(6))
    report = Report("x", "X", _machine={})
    assert add_cells(report, REPETITIVE, 0.0, {PLAIN: plain, "ngram": fast, "model": plain}) == []
    assert len(add_cells(report, REPETITIVE, 0.0, {PLAIN: plain, "ngram": plain})) == 1
    assert add_cells(report, REPETITIVE, 1.0, {PLAIN: plain, "ngram": plain}) == []  # little repeats itself there


def test_the_repetitive_prompts_are_different_and_say_where_they_are_from() -> None:
    lines = (REPO / "benchmarks" / "prompts" / "repetitive.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert len({each["id"] for each in found}) == len({each["prompt"] for each in found}) == len(found) == 24
    assert {each["category"] for each in found} == {"code", "json", "question"}
    assert repetitive_prompts() == [each["prompt"] for each in found]
    for each in found:
        assert each["source"].startswith("CPython 3.11, Lib/") or (REPO / each["source"]).is_file()


@pytest.mark.parametrize(("count", "expected"), [(3, (1, 1, 1)), (12, (4, 4, 4)), (22, (8, 7, 7)), (99, (9, 8, 7))])
def test_any_number_of_prompts_has_all_kinds(count: int, expected: tuple[int, ...]) -> None:
    every = read_prompts(REPETITIVE)
    chosen = of_all_kinds(every, count)
    assert numbers_by_kind(chosen) == dict(zip(("code", "json", "question"), expected, strict=True))
    assert len({prompt.text for prompt in chosen}) == sum(expected)
    for kind in ("code", "json", "question"):  # the first ones
        own = [prompt for prompt in chosen if prompt.kind == kind]
        assert own == [prompt for prompt in every if prompt.kind == kind][: len(own)]


def test_kinds_are_told_apart() -> None:
    """Fast on code, and on nothing else."""
    prompts = [Prompt("code", "a"), Prompt("json", "b"), Prompt("code", "c")]
    plain = Cell([[sample(1.0, made(6))]] * 3)
    drafted = Cell([[sample(0.5, made(6, 5, 5))], [sample(1.0, made(1), made(5))], [sample(0.25, made(6, 5, 5))]])
    report = Report("x", "X", _machine={})
    add_kinds(report, REPETITIVE, 1.0, prompts, {PLAIN: plain, "ngram": drafted})
    found = report.data["repetitive by kind, T = 1"]
    assert {kind: each["num_prompts"] for kind, each in found.items()} == {"code": 2, "json": 1}
    assert {kind: each["tokens_per_pass"]["ngram"] for kind, each in found.items()} == {"code": 6.0, "json": 3.0}
    assert {kind: each["over_plain"]["ngram"]["median"] for kind, each in found.items()} == {"code": 3.0, "json": 1.0}
