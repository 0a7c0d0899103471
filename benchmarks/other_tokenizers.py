"""A draft of another tokenizer beside the same draft with its target's: acceptance, what a small overlap costs, speed.

    make bench-tokenizers                             # or: python -m benchmarks.other_tokenizers --help

Acceptance is as `outrider alpha` measures it, on the demo target. What fewer tokens in common would cost is counted by
taking tokens away from what the vocabularies share, the last first, as byte-pair encoding learnt them; beside it stand
guesses that are the draft's own text, with what it writes for them. Speeds are of the widened target, each draft with a
target and a gateway of its own, answers by turns, as `make bench-heads` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.alpha import shown
from benchmarks.arms import CHAIN_K, PROMPT_TOKENS, Cell, per_pass, speed
from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, REPO, WORK, Report, dev_prompts, num_parameters, parser, widened
from benchmarks.heads import until_drafted
from benchmarks.overlap.checkouts import this_checkout
from benchmarks.overlap.systems import split
from benchmarks.passes import in_turn_at
from outrider.client import Drafter, Speculation
from outrider.drafting.translation import Intersection, Translation
from outrider.lab.alpha import drafter_of, measured
from outrider.lab.models.alpha import SEED, load_draft
from outrider.lab.models.alpha_task import Task
from outrider.lab.models.law_model import AT_ONCE, LawModel
from outrider.lab.models.tally import Estimate
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams

OTHER = REPO / "models/other/draft"
SAME = WORK / "other/draft-target-tokenizer"
"""The draft to compare with, which does not come with the repository: models/other/README.md says how it is made."""
PLAIN, SAME_NAME, TOKENS, STRINGS, DEMO_NAME = (
    "plain",
    "the target's tokenizer",
    "another, tokens of both",
    "another, its own text",
    "the demo draft",
)
SHARES = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Of the target's tokens, that are left in common."""
EVERY = 8
"""Tokens between two places at which a chain is drafted."""
WRITTEN = 128
"""Tokens that a draft writes at each place, enough for the longest chain."""
DEPTHS = (CHAIN_K, 16)

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Compared:
    """What a draft says at the tokens of one answer."""

    ids: list[int]
    """The target's own, prompt included."""
    start: int
    """Where the answer begins."""
    target: Array
    """[N, V] probabilities, all on one at temperature 0."""
    draft: Array
    """[N, V] logits, -inf where it has no token, and wherever it has nothing to say."""

    def kept(self, shared: NDArray[np.int64], *, greedy: bool) -> NDArray[np.float64]:
        """Return the probability [N] that a guess is kept where these tokens alone are shared."""
        logits = self.draft[:, shared].astype(np.float64)
        best = logits.max(axis=1, keepdims=True)
        says = np.isfinite(best[:, 0])
        if greedy:
            return says * (shared[logits.argmax(axis=1)] == self.ids[self.start :])
        with np.errstate(invalid="ignore"):
            probs = np.exp(logits - best)
            overlap = np.minimum(probs / probs.sum(axis=1, keepdims=True), self.target[:, shared]).sum(axis=1)
        return np.where(says, overlap, 0.0)


def compared(target: LawModel, draft: LawModel, prompts: Sequence[list[int]], num: int, t: float) -> Iterator[Compared]:
    """Yield what a draft says along the answers that a target writes at a temperature."""
    params = [
        SamplingParams(temperature=t, max_tokens=num, seed=SEED + i, acceptance=AcceptanceRule.COUPLED)
        for i in range(len(prompts))
    ]
    whole, size = SamplingParams(temperature=1.0), target.runner.facts.vocab_size
    for first in range(0, len(prompts), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        for prompt, own, ids in zip(
            prompts[part], params[part], target.write(prompts[part], num, params[part]), strict=True
        ):
            start = len(prompt)
            laws = [law(own) for law in target.laws(ids, start)]
            said = np.full((len(laws), size), -np.inf, dtype=np.float32)
            for row, law in zip(said, draft.drafts(ids, start), strict=True):
                if (found := law(whole)) is not None:
                    row[:] = found.scores
            yield Compared(ids, start, np.stack([_spread(law, size) for law in laws]), said)


def _spread(law: Any, size: int) -> Array:
    row = np.zeros(size, dtype=np.float32)
    row[slice(None) if law.ids is None else law.ids] = law.probs()
    return row


def runs(right: NDArray[np.float64], depth: int) -> list[int]:
    """Return how many tokens of a chain are kept at each place where one is drafted."""
    places = range(0, len(right) - depth, EVERY)
    return [int(np.cumprod(right[place : place + depth]).sum()) for place in places]


@dataclass(frozen=True)
class Text:
    """What a draft guesses at one place when it writes text of its own."""

    num_kept: int
    num_guessed: int
    num_written: int
    """Of the draft's tokens, for these guesses."""


def texts(draft: LawModel, translation: Translation, answers: Sequence[Compared], depth: int) -> list[list[Text]]:
    """Return what it guesses, by answer, as `TranslatedSlot` reads it but for how far it may write."""
    found = []
    for answer in answers:
        places = range(answer.start, len(answer.ids) - depth, EVERY)
        told = []
        for place in places:
            retokenization = translation.retokenization()
            retokenization.commit(answer.ids[:place], 0)
            told.append(list(retokenization.ids))
        params = [SamplingParams(temperature=0.0, max_tokens=WRITTEN)] * AT_ONCE
        written = list[list[int]]()
        for first in range(0, len(told), AT_ONCE):
            part = told[first : first + AT_ONCE]
            written += draft.write(part, WRITTEN, params[: len(part)])
        found.append(
            [
                _text(translation, answer.ids, place, own[len(ids) :], depth)
                for place, ids, own in zip(places, told, written, strict=True)
            ]
        )
    return found


def _text(translation: Translation, ids: Sequence[int], place: int, own_ids: list[int], depth: int) -> Text:
    guesses, num_written, has_ended = list[int](), 0, False
    while len(guesses) < depth and not has_ended and num_written < len(own_ids):
        num_written += 1
        read, has_ended = translation.read(ids[:place], own_ids[:num_written])
        if read[: len(guesses)] != guesses:
            break
        guesses = read
    pairs = zip(guesses[:depth], ids[place:], strict=False)
    return Text(int(np.cumprod([one == other for one, other in pairs]).sum()), len(guesses[:depth]), num_written)


def add_overlaps(report: Report, options: argparse.Namespace) -> None:
    """Add what a draft is worth by how much of the vocabulary it shares."""
    task = Task(str(DEMO_TARGET), [], [], options.max_tokens, [], "float32", "cpu")
    target = LawModel(task.target, task, AT_ONCE * (PROMPT_TOKENS + options.max_tokens))
    target_json = (DEMO_TARGET / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_buffer(target_json)
    prompts = [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(options.prompts)]
    rows, by_text = [], []
    for name, folder in ((SAME_NAME, SAME), ("another", OTHER)):
        draft = load_draft(target, str(folder), task, 2 * PROMPT_TOKENS + WRITTEN)
        facts = draft.runner.facts
        files = (target_json, (folder / "tokenizer.json").read_bytes())
        strings = Intersection(*files, target.runner.facts.vocab_size, facts.vocab_size, facts.eos_token_ids)
        whole = np.flatnonzero(np.isfinite(strings.logits(np.zeros(facts.vocab_size, dtype=np.float32))))
        found = {t: list(compared(target, draft, prompts, options.max_tokens, t)) for t in (0.0, 1.0)}
        num_texts = sum(1 for raw in strings.spelling if raw)
        report.text(
            f"Of the {num_texts} tokens of the target that stand for text, {len(whole)} are one token of {name} too, "
            f"{100 * len(whole) / num_texts:.0f} %; of the smaller vocabulary {100 * strings.share:.0f} %. The draft "
            f"has {num_parameters(folder):,} parameters."
        )
        for share in (len(whole) / num_texts, *SHARES):
            num = round(share * num_texts)
            if num > len(whole):
                continue
            shared, row = whole[:num], [name, f"{100 * share:.0f} %", f"{100 * num / strings.num_texts:.0f} %"]
            for t, answers in found.items():
                kept = [each.kept(shared, greedy=not t).tolist() for each in answers]
                row.append(shown(Estimate.of(kept)))
            for depth in DEPTHS:
                chains = [runs(each.kept(shared, greedy=True), depth) for each in found[0.0]]
                row.append(shown(Estimate.of(chains)))
            rows.append(row)
        for depth in DEPTHS:
            guessed = texts(draft, strings, found[0.0], depth)
            flat = [text for each in guessed for text in each]
            kept = shown(Estimate.of([[text.num_kept for text in each] for each in guessed]))
            written = [text.num_written for text in flat]
            steps = [f"{statistics.fmean(written):.1f}", f"{np.quantile(written, 0.99):.0f}", str(max(written))]
            num_short = sum(text.num_guessed < depth for text in flat)
            by_text.append([name, str(depth), kept, *steps, f"{100 * num_short / len(flat):.0f} %"])
            report.data[f"texts, {name}, {depth}"] = [
                [text.num_kept, text.num_guessed, text.num_written] for text in flat
            ]
    chains = [f"kept of {depth}, T = 0" for depth in DEPTHS]
    columns = ("draft's tokenizer", "of the target's tokens", "of the smaller", "alpha, T = 0", "alpha, T = 1", *chains)
    report.table("Tokens of both, by how many there are", columns, rows)
    columns = ("draft's tokenizer", "guesses", "kept", "written", "99 %", "most", "ended before")
    report.table("The draft's own text, T = 0", columns, by_text)


def add_acceptance(report: Report, options: argparse.Namespace) -> None:
    task = {
        "target": str(DEMO_TARGET),
        "drafters": [drafter_of(str(folder)) for folder in (SAME, OTHER, DEMO_DRAFT)],
        "prompts": dev_prompts(options.prompts),
        "max_tokens": options.max_tokens,
        "settings": [{"temperature": each} for each in options.temperatures],
        "dtype": "float32",
        "device": "cpu",
    }
    found = measured(task, Console(stderr=True))
    names = [SAME_NAME, TOKENS, DEMO_NAME] * len(options.temperatures)
    rows = [
        [name, f"{row['setting']['temperature']:g}"]
        + [shown(Estimate(**row[key])) for key in ("alpha", "coupled", "greedy", "drafted")]
        for name, row in zip(names, found, strict=True)
    ]
    report.table("Acceptance", ("draft", "T", "alpha", "coupled", "greedy", "guesses at"), rows)
    report.data["acceptance"] = found


async def add_speeds(report: Report, options: argparse.Namespace) -> list[str]:
    """Return what is wrong: a text at temperature 0 that is not plain decoding's."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(options.timed_prompts)]
    systems = {
        SAME_NAME: (SAME, "draft_service"),
        TOKENS: (OTHER, "draft_service"),
        STRINGS: (OTHER, "benchmarks.text_draft"),
        DEMO_NAME: (DEMO_DRAFT, "draft_service"),
    }
    drafting, wrong = Speculation(drafter=Drafter.MODEL), list[str]()
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for name, (folder, module) in systems.items():
            pair = split(this_checkout(), widened(options.size), folder, draft_module=module)
            found = await stack.enter_async_context(pair)
            await until_drafted(name, found.near.client, drafting, found.draft)
            clients[name] = clients[in_each(name)] = found.near.client
        clients[PLAIN] = clients[SAME_NAME]
        for temperature in options.temperatures:
            names = [name for name in systems if not (temperature and name == STRINGS)]  # it draws tokens there
            arms = {PLAIN: Speculation(enabled=False)} | dict.fromkeys(names, drafting)
            arms |= {in_each(name): Speculation(drafter=Drafter.MODEL, num_draft_tokens=CHAIN_K) for name in names}
            samples = await in_turn_at(
                clients,
                prompts,
                arms,
                temperature=temperature,
                max_tokens=options.max_tokens,
                repetitions=options.repetitions,
            )
            cells = {name: Cell(name, each) for name, each in samples.items()}
            _add_cells(report, temperature, cells)
            if not temperature:
                wrong += [
                    f"{name} changes the text" for name, cell in cells.items() if cell.texts != cells[PLAIN].texts
                ]
    return wrong


def in_each(name: str) -> str:
    return f"{name}, K = {CHAIN_K}"


def _add_cells(report: Report, temperature: float, cells: dict[str, Cell]) -> None:
    rows = []
    for name, cell in cells.items():
        same = cells[in_each(SAME_NAME) if name.endswith(in_each("")) else SAME_NAME]
        over = [] if name == PLAIN else [str(cell.over(cells[PLAIN], speed))]
        over += [] if cell in (cells[PLAIN], same) else [str(cell.over(same, per_pass))]
        rows.append([*cell.row, *over, *[""] * (2 - len(over))])
    columns = ("draft", "drafted a pass", "kept", "tokens a pass", "tok/s")
    ratios = (f"speed over {PLAIN}", f"tokens a pass over {SAME_NAME}")
    report.table(f"Served, T = {temperature:g}", (*columns, *ratios), rows)
    report.data[f"served, T = {temperature:g}"] = {name: cell.data(per_pass, speed) for name, cell in cells.items()}


def main() -> int:
    made = parser(
        __doc__, size="94M", temperatures=[0.0, 0.7, 1.0], prompts=24, timed_prompts=12, max_tokens=64, repetitions=1
    )
    options = made.parse_args()
    if not (SAME / "config.json").is_file():
        sys.exit(f"{SAME} holds no draft with the target's tokenizer: train it as models/other/README.md says")
    report = Report("tokenizers", "A draft of another tokenizer")
    report.text(
        f"The demo target, float32, and two drafts of one shape, trained alike on one text (models/other): one has the "
        f"target's tokenizer, one has another. Held-out prompts, {options.max_tokens} tokens each. Acceptance and "
        f"counts: {options.prompts} prompts, after ± the interval of 95 %. Served: {options.timed_prompts} prompts, "
        f"the target WIDENED to {options.size}, draft and target a core each, one answer at a time, "
        f"{options.repetitions} repetitions; in brackets the interval of 95 % from a bootstrap over prompts."
    )
    add_acceptance(report, options)
    add_overlaps(report, options)
    wrong = asyncio.run(add_speeds(report, options))
    report.verdict(wrong, "No violation: at temperature 0 no draft changes the text.")
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
