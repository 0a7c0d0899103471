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

from benchmarks.common import REPO, Report
from benchmarks.coupled_parity import (
    IN_THE_TARGET,
    INVARIANT,
    KILLED,
    MODEL,
    NEAR_TIE,
    OFF,
    RANDOM,
    Flip,
    Killer,
    Outcome,
    Setting,
    violations,
    wanted,
)
from benchmarks.drafters import DEV, LEAST_RATIO, PLAIN, REPETITIVE, Cell, Ratio, add_cells, repetitive_prompts
from benchmarks.passes import Sample
from outrider.client import Round, RoundTimings, Token, TokenKind

GOOD = Outcome(Setting("ngram", 4, 8, 1.0), 24, num_drafted=100, num_accepted=50, num_plain_steps=3, flips=[])


def flip(gap: float) -> Flip:
    return Flip(prompt=3, position=17, expected=5, found=6, gap=gap)


def test_any_difference_is_a_violation_where_batches_do_not_matter() -> None:
    assert violations(INVARIANT, [GOOD]) == []
    found = violations(INVARIANT, [replace(GOOD, flips=[flip(1e-9)])])
    assert len(found) == 1
    assert "prompt 3 differs at token 17" in found[0]


@pytest.mark.parametrize(("gap", "num"), [(0.5 * NEAR_TIE, 0), (NEAR_TIE, 1), (math.inf, 1), (math.nan, 1)])
def test_elsewhere_a_near_tie_is_none(gap: float, num: int) -> None:
    assert len(violations("default", [replace(GOOD, flips=[flip(gap)])])) == num


def test_what_shows_nothing_is_a_violation() -> None:
    assert "nothing was drafted" in violations(INVARIANT, [replace(GOOD, num_drafted=0)])[0]
    assert violations(INVARIANT, [replace(GOOD, setting=Setting(OFF, 0, 8, 1.0), num_drafted=0)]) == []
    killed = replace(GOOD, setting=Setting(KILLED, 8, 8, 1.0), num_plain_steps=10 * GOOD.num_texts)
    assert violations(INVARIANT, [killed]) == []
    ends = replace(killed, num_plain_steps=GOOD.num_texts)  # an answer's last token needs no draft
    assert "killed too late" in violations(INVARIANT, [ends])[0]


def test_everything_is_asked_for_where_nothing_may_differ() -> None:
    class Options:
        temperatures, k, concurrency = [0.7, 1.0], [1, 4, 8], [8, 1]

    settings = wanted(Options, INVARIANT)  # type: ignore[arg-type]
    assert len(settings) == len(set(settings))
    drafters = {MODEL, *IN_THE_TARGET, RANDOM}
    for temperature in Options.temperatures:
        loaded = {(s.drafter, s.k) for s in settings if s.concurrency == 8 and s.temperature == temperature}
        assert loaded == {(OFF, 0), (KILLED, 8), *itertools.product(drafters, (1, 4, 8))}
        alone = {(s.drafter, s.k) for s in settings if s.concurrency == 1 and s.temperature == temperature}
        assert alone == loaded - {(OFF, 0)}
    assert all(each.speculation.enabled == (each.drafter != OFF) for each in settings)


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


def cell(elapsed_s: float, *rounds: Round) -> Cell:
    ids = [token.id for each in rounds for token in each.tokens]
    return Cell([[Sample([ids], list(rounds), elapsed_s)]] * 3)


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
    assert add_cells(report, REPETITIVE, 0.0, {PLAIN: plain, "ngram": slow}) == []


def test_the_repetitive_prompts_are_different_and_say_where_they_are_from() -> None:
    lines = (REPO / "benchmarks" / "prompts" / "repetitive.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert len({each["id"] for each in found}) == len({each["prompt"] for each in found}) == len(found) == 24
    assert {each["category"] for each in found} == {"code", "json", "question"}
    assert repetitive_prompts() == [each["prompt"] for each in found]
    for each in found:
        assert each["source"].startswith("CPython 3.11, Lib/") or (REPO / each["source"]).is_file()
