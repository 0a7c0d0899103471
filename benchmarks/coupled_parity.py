"""Check that nothing but the target changes a coupled text: drafters, K, load, and a draft that dies half-way.

    make bench-coupled-parity                               # or: python -m benchmarks coupled-parity --help

Every text has a seed of its own, and is first made without speculation, one at a time. With `--batch-invariant` targets
all others must be the same to the last token, or the exit code is 1. On the paths whose sums depend on the batch's
shape (`fused`, the default, is none of them), floating point may flip two ids whose sums of log-prob and noise all but
coincide: each flip is listed with that gap. A flip wider than the mode's arithmetic was seen to move two sums is a
failure, too, and so is an arithmetic that moves them by more than there is a reason for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, DTYPE, Option, Report, dev_prompts, random_draft
from benchmarks.footprint import worker_info
from benchmarks.passes import Sample, run_pass
from benchmarks.runner import Benchmark
from benchmarks.running import running
from outrider.cli.up.endpoints import Endpoints
from outrider.client import AcceptanceRule, AsyncClient, Drafter, Round, Speculation
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.coupled import gumbels_of, uniforms
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.step_plan import Row
from outrider.lab.models.reference_generate import first_difference
from outrider.wire import kinds
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig

NEAR_TIE = 1e-3
"""Nats; the least gap that is forgiven, a hundred times what the order of sums moves a log-prob by in float32."""
FAR = {"float32": NEAR_TIE, "bfloat16": 2.0}
"""Nats, by dtype; an arithmetic that moves two sums by more is wrong. bfloat16 keeps 8 bits: a logit of 16 or more
has steps of an eighth, which temperature 0.7 makes a fifth, and its inputs were rounded some tens of times
before."""
NUM_BEST = 8
"""Best sums of a position that are compared, as those that another arithmetic may put first."""
INVARIANT = "batch-invariant"
MODES: Mapping[str, Mapping[str, object]] = {
    INVARIANT: {"batch_invariant": True},
    "paged": {"attention_path": "paged"},
    "paged-bfloat16": {"attention_path": "paged", "dtype": "bfloat16"},
    "dense": {"attention_path": "dense"},
}
"""The target's settings by mode: with the promise of batch invariance, and on paths that cannot give it."""
NOT_ASKED = ("dense",)
"""Modes that are measured only if named."""
OFF, MODEL, RANDOM, KILLED = "none", "model", "model of random weights", "model, killed half-way"
IN_THE_TARGET = ("ngram", "lookup")
DRAFTERS = {OFF: Drafter.MODEL, MODEL: Drafter.MODEL, RANDOM: Drafter.MODEL, KILLED: Drafter.MODEL}


@dataclass(frozen=True)
class Setting:
    """How texts are made. The texts must not depend on it."""

    drafter: str
    k: int
    concurrency: int
    temperature: float

    def __str__(self) -> str:
        return f"drafter {self.drafter}, K = {self.k}, {self.concurrency} at once, T = {self.temperature:g}"

    @property
    def cells(self) -> list[str]:
        return [self.drafter, str(self.k), str(self.concurrency), f"{self.temperature:g}"]

    @property
    def speculation(self) -> Speculation:
        return Speculation(
            enabled=self.drafter != OFF,
            num_draft_tokens=self.k,
            acceptance=AcceptanceRule.COUPLED,
            drafter=DRAFTERS.get(self.drafter) or Drafter(self.drafter),
        )


@dataclass(frozen=True)
class Flip:
    """The first difference of a text from that of plain decoding."""

    prompt: int
    position: int
    """Index among the answer's tokens."""
    expected: int
    found: int
    gap: float
    """Nats from the largest sum of log-prob and noise down to the smaller of these two."""


@dataclass(frozen=True)
class Outcome:
    """The result of one pass."""

    setting: Setting
    num_texts: int
    num_tokens: int
    """Tokens compared; of a text that differs, those up to and including the first difference."""
    num_drafted: int
    num_accepted: int
    num_plain_steps: int
    flips: list[Flip]


class Judge:
    """Runs the target alone, in this process, to find how near the sums of log-prob and noise at a position are."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        """Load the target in float32, whose sums are the nearest to the true ones."""
        self._runner = runner_of({"dtype": "float32"})
        self._prompts = prompts

    def gap(self, index: int, before: Sequence[int], ids: Sequence[int], temperature: float) -> float:
        """Return the nats from the largest sum to the least of `ids`, after `before` in the answer to prompt
        `index`."""
        sums = self._sums(self._runner, index, before, 1, temperature)[0]
        return float(sums.max() - np.min(sums[list(ids)]))

    def moved(self, settings: Mapping[str, object], texts: Mapping[float, Sequence[Sequence[int]]]) -> float:
        """Return the most nats by which a target with `settings` moves two of a position's best sums apart or together.

        texts: by temperature, an answer to each prompt; every token is looked at, in one forward for each text. The
        wrong one of two sums is above only if it is moved against the other by their gap or more. Batches of another
        shape may move them a little further than what is found here.
        """
        runner, most = runner_of(settings), 0.0
        for temperature, answers in texts.items():
            for index, answer in enumerate(answers):
                of = (index, answer[:-1], len(answer), temperature)
                true, found = self._sums(self._runner, *of), self._sums(runner, *of)
                best = np.argpartition(true, -NUM_BEST, axis=1)[:, -NUM_BEST:]
                most = max(most, float(np.ptp(np.take_along_axis(found - true, best, axis=1), axis=1).max()))
        return most

    def _sums(
        self, runner: ModelRunner, index: int, before: Sequence[int], num: int, temperature: float
    ) -> NDArray[np.float64]:
        """Return the sums [num, V] at the last `num` positions of prompt `index` and `before`."""
        tokens, table = [*self._prompts[index], *before], runner.pool.new_table()
        try:
            logits = runner.forward([Row.of(table, tokens, 0, num)])  # [num, V] float32
        finally:
            table.free()
        params = SamplingParams(temperature=temperature, seed=index, acceptance=kinds.AcceptanceRule.COUPLED)
        laws, row = HostLogits(logits), LogitRow(SamplingState(params, (), ()))
        first = len(tokens) - num + 1
        noise = [gumbels_of(uniforms(params, first + i, laws.vocab_size)) for i in range(num)]
        return np.stack([laws.distribution(i, row).scores + noise[i] for i in range(num)])


def runner_of(settings: Mapping[str, Any]) -> ModelRunner:
    """Load the demo target with a worker's settings, for one text at a time."""
    sizes: dict[str, Any] = {"kv_cache_tokens": 2048, "max_slots": 1, "context_limit": None}
    return load_runner(TargetConfig(model=str(DEMO_TARGET), device="cpu", **sizes, **settings))


ENDS = 2
"""Rounds of an answer that may be without drafts though the draft lives: its first, and a last one for one token."""


class Parity:
    """The reference of one mode, and what was compared with it."""

    def __init__(self, options: argparse.Namespace, prompts: list[list[int]], mode: str, judge: Judge) -> None:
        self.outcomes: list[Outcome] = []
        self._options, self._prompts, self._mode, self._judge = options, prompts, mode, judge
        self._plain: dict[float, list[list[int]]] = {}

    @contextlib.contextmanager
    def system(self, draft: Path) -> Iterator[Endpoints]:
        """Run a system."""
        target = {"model": str(DEMO_TARGET), **self.target}
        draft_settings = {"model": str(draft), "dtype": self._options.dtype}
        with running(target, draft_settings, {"lookup_scope": "shared"}) as endpoints:
            info = worker_info(endpoints.first("target"))
            if info.is_batch_invariant != (self._mode == INVARIANT):
                sys.exit(f"the target computes on {info.attention_path}: that is not the mode {self._mode}")
            yield endpoints

    @property
    def target(self) -> dict[str, object]:
        """The target's settings, the model's apart."""
        return {"dtype": self._options.dtype, **MODES[self._mode]}

    def near_tie(self) -> float | None:
        """Return the nats up to which a flip is forgiven, once texts were made; None when none is."""
        return None if self._mode == INVARIANT else max(NEAR_TIE, self._judge.moved(self.target, self._plain))

    def run(self) -> None:
        settings = wanted(self._options, self._mode)
        with self.system(DEMO_DRAFT) as endpoints:
            for temperature in self._options.temperatures:
                sample = asyncio.run(self._pass(endpoints, Setting(OFF, 0, 1, temperature)))
                self._plain[temperature] = sample.outputs
            for setting in settings:
                if setting.drafter not in (RANDOM, KILLED):
                    self._compare(endpoints, setting)
        of_random = [setting for setting in settings if setting.drafter == RANDOM]
        if of_random:
            with self.system(random_draft()) as endpoints:
                for setting in of_random:
                    self._compare(endpoints, setting)
        for setting in settings:
            if setting.drafter == KILLED:
                with self.system(DEMO_DRAFT) as endpoints:
                    self._compare(endpoints, setting)

    async def _pass(self, endpoints: Endpoints, setting: Setting) -> Sample:
        async with AsyncClient(endpoints.grpc) as client:
            return await run_pass(
                client,
                self._prompts,
                concurrency=setting.concurrency,
                temperature=setting.temperature,
                max_tokens=self._options.max_tokens,
                speculation=setting.speculation,
                on_round=self._killer(endpoints, setting),
            )

    def _killer(self, endpoints: Endpoints, setting: Setting) -> Callable[[Round], None]:
        """Return what ends the draft half-way through all texts, as kill -9 does, in a setting that says so."""
        if setting.drafter != KILLED:
            return lambda item: None
        pid, max_tokens = worker_info(endpoints.first("draft")).pid, self._options.max_tokens
        num_left = len(self._prompts) // 2 * max_tokens + (max_tokens + 1) // 2  # even alone, a text is half done

        def count(item: Round) -> None:
            nonlocal num_left
            is_alive = num_left > 0
            num_left -= len(item.tokens)
            if is_alive and num_left <= 0:
                os.kill(pid, signal.SIGKILL)

        return count

    def _compare(self, endpoints: Endpoints, setting: Setting) -> None:
        """Make the texts of a setting and compare them with plain decoding's."""
        sample = asyncio.run(self._pass(endpoints, setting))
        plain = self._plain[setting.temperature]
        flips = list[Flip]()
        for index, (one, other) in enumerate(zip(plain, sample.outputs, strict=True)):
            position = first_difference(one, other)
            if position is not None:
                ids = one[position], other[position]  # all are max_tokens long: ends of sequence are ignored
                gap = self._judge.gap(index, one[:position], ids, setting.temperature)
                flips.append(Flip(index, position, *ids, gap))
        self.outcomes.append(
            Outcome(
                setting,
                len(plain),
                sum(map(len, plain)) - sum(len(plain[each.prompt]) - each.position - 1 for each in flips),
                sum(item.num_drafted for item in sample.rounds),
                sum(item.num_accepted for item in sample.rounds),
                sum(not item.num_drafted for item in sample.rounds),
                flips,
            )
        )
        print(f"{self._mode}, {setting}: {len(flips)} of {len(plain)} texts differ", flush=True)


def wanted(options: argparse.Namespace, mode: str) -> list[Setting]:
    """Return every drafter with every K, one at a time and under load.

    Where batches matter it is a part of that: under load only, the draft model with every K and `ngram` with the
    largest.
    """
    drafted = [*itertools.product((MODEL, *IN_THE_TARGET, RANDOM, KILLED), options.k)]
    if mode != INVARIANT:
        drafted = [*itertools.product((MODEL,), options.k), ("ngram", options.k[-1])]
    found = []
    for concurrency, temperature in itertools.product(options.concurrency, options.temperatures):
        if concurrency > 1:
            found.append(Setting(OFF, 0, concurrency, temperature))
        found += [Setting(drafter, k, concurrency, temperature) for drafter, k in drafted]
    return found


def violations(mode: str, outcomes: Sequence[Outcome], forgiven: float | None, far: float) -> list[str]:
    """Return what must not have happened. forgiven: as `Parity.near_tie`, which may be
    `far` at most."""
    found = []
    if forgiven is not None and not forgiven <= far:
        found.append(f"{mode}: sums are moved by {forgiven:.1e} nats, more than {far:g}")
    for each in outcomes:
        where = f"{mode}, {each.setting}"
        for flip in each.flips:
            if forgiven is None or not flip.gap <= forgiven:
                found.append(f"{where}: prompt {flip.prompt} differs at token {flip.position}, gap {flip.gap:.1e}")
        if each.setting.drafter != OFF and not each.num_drafted:
            found.append(f"{where}: nothing was drafted, so nothing was shown")
        if each.setting.drafter not in (OFF, RANDOM) and not each.num_accepted:
            found.append(f"{where}: no draft was kept")
        if each.setting.drafter == KILLED and each.num_plain_steps <= ENDS * each.num_texts:
            found.append(f"{where}: no plain step: the draft was killed too late")
    return found


def counted(outcomes: Sequence[Outcome]) -> str:
    """Return the texts, tokens and flips of all passes, in words."""
    num_texts, num_tokens = sum(each.num_texts for each in outcomes), sum(each.num_tokens for each in outcomes)
    found = f"{len(outcomes)} passes, {num_texts} texts, {num_tokens} tokens compared: "
    gaps = [flip.gap for each in outcomes for flip in each.flips]
    if not gaps:
        return f"{found}no text differs."
    places = {(each.setting.temperature, flip.prompt, flip.position) for each in outcomes for flip in each.flips}
    return (
        f"{found}{len(gaps)} texts differ, first at {len(places)} different places, where the two sums are "
        f"{min(gaps):.1e} to {max(gaps):.1e} nats apart."
    )


def add_outcomes(report: Report, mode: str, outcomes: Sequence[Outcome], forgiven: float | None) -> None:
    rows = []
    for each in outcomes:
        equal = f"{each.num_texts - len(each.flips)} of {each.num_texts}"
        drafted = [str(each.num_drafted), str(each.num_accepted), str(each.num_plain_steps)]
        rows.append([*each.setting.cells, equal, *drafted])
    where = ("drafter", "K", "at once", "T")
    heading = "Target in batch-invariant mode" if mode == INVARIANT else f"Target on {mode}, not batch-invariant"
    report.table(heading, (*where, "texts as plain", "drafted", "kept", "plain steps"), rows)
    tie = "" if forgiven is None else f" A near-tie is up to {forgiven:.3g} nats wide."
    report.text(counted(outcomes) + tie)
    flips = list[list[str]]()
    for each in outcomes:
        for flip in each.flips:
            place = [str(flip.prompt), str(flip.position), str(flip.expected), str(flip.found)]
            flips.append([*each.setting.cells, *place, f"{flip.gap:.1e}"])
    if flips:
        report.table(
            f"{heading}: first differences, with the gap of the two sums of log-prob and noise, nats",
            (*where, "prompt", "token", "expected", "found", "gap"),
            flips,
        )
    report.data[mode] = {"near_tie": forgiven, "passes": [asdict(each) for each in outcomes]}


def measure(report: Report, options: argparse.Namespace) -> list[str]:
    """Make the texts of all modes. Returns the violations."""
    report.text(
        f"The demo pair, {options.dtype}; {options.prompts} prompts of held-out text, {options.max_tokens} tokens an "
        "answer, `coupled`, a seed each. Every text is compared with that of plain decoding, one at a time, in the "
        "same mode. In batch-invariant mode all drafters at every K; elsewhere the model at every K, and ngram at "
        f"K = {options.k[-1]}. There a near-tie is as wide as the mode's arithmetic moves two of a position's "
        f"{NUM_BEST} best sums, found by one forward for each text, beside the default path in float32; {NEAR_TIE:g} "
        "nats at least."
    )
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in dev_prompts(options.prompts)]
    judge = Judge(prompts)
    wrong: list[str] = []
    for mode in options.modes:
        parity = Parity(options, prompts, mode, judge)
        parity.run()
        forgiven = parity.near_tie()
        add_outcomes(report, mode, parity.outcomes, forgiven)
        wrong += violations(mode, parity.outcomes, forgiven, FAR[str(parity.target["dtype"])])
    return wrong


BENCHMARK = Benchmark(
    "Coupled text, whatever drafts",
    measure,
    {
        "prompts": 24,
        "max_tokens": 128,
        "temperatures": [0.7, 1.0],
        "k": [1, 4, 8],
        "concurrency": [8, 1],
        "dtype": DTYPE,
        "modes": Option([mode for mode in MODES if mode not in NOT_ASKED], choices=tuple(MODES)),
    },
)
