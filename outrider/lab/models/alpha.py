"""`python -m outrider.lab.models.alpha`: measure how well drafters guess a target, for `outrider alpha`.

It reads one line of JSON on stdin, a `Task`, and writes lines on stdout: {"event": "progress", "text"} and at the end
{"event": "measured", "rows": [...]}, one of `Tally.row` each, or {"event": "failed", "message"}.

The target writes an answer to each prompt under the setting; at each of its tokens every drafter's law is compared with
the target's, after the same tokens. Leviathan et al. 2023: alpha = E[sum of min(target, draft)] (Corollary 3.6).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from outrider.drafting import drafter as drafting
from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.translation import Translation, between
from outrider.engine.attention.varlen_attention import BLOCK_SIZE
from outrider.engine.drafters import OF_TEXT
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.families import Family, family_of
from outrider.engine.loading.loaded import load
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.count_law import law_of_counts
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.step_plan import Row as ModelRow
from outrider.engine.step_plan import Source
from outrider.wire.errors import ConfigError
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.models.fingerprint import tokenizer_fingerprint
from outrider.wire.processes.processes import tell_all
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig

MODEL = "model"
TABLES = ("unigram", "bigram", "ngram", "lookup")
SEED = 20230101
AT_ONCE = 8
"""Answers that the target writes side by side. Doubling it doubles the cache that both models need."""
DRAFT_TEMPERATURES = (1.0, 0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)
"""Temperatures of a draft that are compared, over the target's, or themselves where that is 0; of equals the first.
Each costs a softmax of the draft's logits a token. Twice as many: the best is met more closely."""

LawAt = Callable[[SamplingParams], RowLaw | None]
"""The law of one position under any parameters; None where the drafter has no guess."""


@dataclass(frozen=True)
class DrafterSpec:
    """Names a drafter to be measured."""

    kind: str
    """One of MODEL and TABLES."""
    source: str | None
    """A model's folder or hub id; the text file of unigram and bigram."""

    @property
    def name(self) -> str:
        return self.kind if self.source is None else f"{self.kind}:{self.source}"


@dataclass(frozen=True)
class Task:
    """A measurement, as it is read from stdin."""

    target: str
    drafters: list[DrafterSpec]
    prompts: list[str]
    max_tokens: int
    settings: list[dict[str, float]]
    """Fields of SamplingParams: temperature, top_k, top_p, min_p."""
    dtype: str = "auto"
    device: str = "auto"
    leniences: list[float] = field(default_factory=list)
    """For each the rows tell what would be kept under it, of the same text."""

    @classmethod
    def read(cls, line: str) -> Task:
        values = json.loads(line)
        return cls(**{**values, "drafters": [DrafterSpec(**each) for each in values["drafters"]]})


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens, and half the width of its 95 % interval, in which prompts are the independent samples.

    The mean is None without values, the error where fewer than two prompts have any.
    """

    mean: float | None
    error: float | None

    @classmethod
    def of(cls, by_prompt: Sequence[Sequence[float]]) -> Estimate:
        kept = [values for values in by_prompt if values]
        num, total = sum(map(len, kept)), sum(map(sum, kept))
        if not num:
            return cls(None, None)
        mean = total / num
        if len(kept) < 2:
            return cls(mean, None)
        return cls(mean, half_width(moves(kept, mean)))


def moves(by_prompt: Sequence[Sequence[float]], mean: float) -> list[float]:
    """Return by how much each prompt moves the mean of all values."""
    num = sum(map(len, by_prompt))
    return [(sum(values) - mean * len(values)) / num for values in by_prompt]


def half_width(moves: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a ratio of sums that two clusters or more move by so much.

    It is the linearised variance, also of a difference of such ratios (Cochran, "Sampling techniques", section 6.4).
    """
    return 1.96 * math.sqrt(sum(move * move for move in moves) * len(moves) / (len(moves) - 1))


@dataclass(frozen=True)
class TargetToken:
    """A token that the target wrote."""

    id: int
    position: int
    """Of the sequence."""
    law: RowLaw
    """What it was drawn from."""
    whole: RowLaw
    """The same at temperature 1 and without cuts."""

    def keeps(self, token_id: int, lenience: float) -> bool:
        """Return whether the token would be kept there at temperature 0: it has at least `lenience` times the
        probability of the best one (Leviathan et al. 2023, A.5).
        """
        return self.whole.score(token_id) >= float(self.whole.scores.max()) + math.log(lenience)


@dataclass
class Tally:
    """Collects the values of one drafter under one setting at each token, a list a prompt."""

    temperatures: Sequence[float]
    """Of the draft, compared; the first is the target's own."""
    leniences: Sequence[float] = ()
    alpha: list[list[float]] = field(default_factory=list)
    bound: list[list[float]] = field(default_factory=list)
    coupled: list[list[float]] = field(default_factory=list)
    greedy: list[list[float]] = field(default_factory=list)
    drafted: list[list[float]] = field(default_factory=list)
    at_temperature: list[list[list[float]]] = field(init=False)
    """alpha by the draft's temperature."""
    lenient: list[list[list[float]]] = field(init=False)
    """What would be kept, by lenience."""

    def __post_init__(self) -> None:
        self.at_temperature = [[] for _ in self.temperatures]
        self.lenient = [[] for _ in self.leniences]

    def begin(self) -> None:
        single = (self.alpha, self.bound, self.coupled, self.greedy, self.drafted)
        for values in (*single, *self.at_temperature, *self.lenient):
            values.append([])

    def add(self, token: TargetToken, draft: LawAt, params: SamplingParams) -> None:
        """Compare the drafter's law with the target's at one token, which the noise of `params` picked."""
        law = draft(params)
        self.drafted[-1].append(float(law is not None))
        if law is None:
            return
        alpha = overlap(token.law, law)
        self.alpha[-1].append(alpha)
        self.bound[-1].append(alpha / (2.0 - alpha))  # (1 - TV) / (1 + TV), TV = 1 - alpha
        self.coupled[-1].append(float(coupled_id(law, params, token.position) == token.id))
        self.greedy[-1].append(float(_best(token.law) == _best(law)))
        for values, temperature in zip(self.at_temperature, self.temperatures, strict=True):
            other = draft(replace(params, temperature=temperature))
            assert other is not None, "a temperature bans no token"
            values[-1].append(overlap(token.law, other))
        for values, lenience in zip(self.lenient, self.leniences, strict=True):
            kept = token.keeps(_best(law), lenience) if params.greedy else overlap(token.law, law, lenience)
            values[-1].append(float(kept))

    def row(self, drafter: str, setting: dict[str, float]) -> dict[str, Any]:
        names = ("alpha", "bound", "coupled", "greedy", "drafted")
        estimates: dict[str, Any] = {name: asdict(Estimate.of(getattr(self, name))) for name in names}
        estimates["draft_temperature"] = self._best_temperature()
        if self.leniences:
            found = [asdict(Estimate.of(values)) for values in self.lenient]
            estimates["lenient"] = [
                {"lenience": lenience, **each} for lenience, each in zip(self.leniences, found, strict=True)
            ]
        num_tokens = sum(map(len, self.drafted))
        return {"drafter": drafter, "setting": setting, "num_tokens": num_tokens, **estimates}

    def _best_temperature(self) -> dict[str, Any] | None:
        """Return the draft's temperature with the largest alpha, that alpha, and what it gains; None without a guess.

        The gain is over the target's temperature, on the same tokens.
        """
        found = [Estimate.of(values) for values in self.at_temperature]
        if found[0].mean is None:
            return None
        best = max(range(len(found)), key=lambda index: found[index].mean)  # type: ignore[arg-type, return-value]
        gains = [
            [mine - own for mine, own in zip(*pair, strict=True)]
            for pair in zip(self.at_temperature[best], self.at_temperature[0], strict=True)
        ]
        return {
            "temperature": self.temperatures[best],
            "alpha": asdict(found[best]),
            "gain": asdict(Estimate.of(gains)),
        }


def draft_temperatures(temperature: float) -> list[float]:
    """Return the temperatures of a draft that are compared at the target's, which is the first."""
    if temperature == 0.0:
        return sorted(DRAFT_TEMPERATURES)
    return [temperature * each for each in DRAFT_TEMPERATURES]


def overlap(target: RowLaw, draft: RowLaw, lenience: float = 1.0) -> float:
    """Return the probability that a draft token is kept by the rule by token: the sum of min(target / lenience, draft).

    Leviathan et al. 2023, Corollary 3.6 and, below a lenience of 1, A.5.
    """
    return float(np.minimum(target.probs() / lenience, draft.probs_at(target)).sum())


def _best(law: RowLaw) -> int:
    return law.id_of(int(law.scores.argmax()))


class _Sequence:
    """A prompt and what is written to it, in the cache. An encoder, where there is one, reads the prompt at once."""

    def __init__(self, runner: ModelRunner, prompt: Sequence[int]) -> None:
        start = runner.facts.decoder_start_ids
        self.ids, self.num_cached = list(start or prompt), 0
        """Tokens that the law depends on, but for a source."""
        self.num_before = len(prompt) - len(self.ids)
        """Tokens of the prompt that are not among them."""
        self._table = runner.pool.new_table()
        self._source = Source(runner.pool.new_table(), list(prompt)) if start else None
        if self._source is not None:
            runner.forward([ModelRow(self._table, (), 0, 0, (), source=self._source)])

    @property
    def position(self) -> int:
        """Of the next token, prompt counted."""
        return self.num_before + len(self.ids)

    def row(self, num_logits: int) -> ModelRow:
        return ModelRow.of(self._table, self.ids, self.num_cached, num_logits, self._source)

    def change(self, ids: list[int], num_same: int) -> None:
        """Become other tokens, of which so many are as they were; the last of them is not cached."""
        self.ids, self.num_cached = ids, min(self.num_cached, num_same, len(ids) - 1)
        self._table.truncate(self.num_cached)

    def free(self) -> None:
        self._table.free()
        if self._source is not None:
            self._source.table.free()


class LawModel:
    """A draft or target model that returns its laws along whole sequences."""

    def __init__(self, model: str, task: Task, num_tokens: int) -> None:
        """Load the model. num_tokens: of all sequences that are held at once, AT_ONCE at most. Raises ConfigError."""
        num_tokens += 2 * AT_ONCE * BLOCK_SIZE  # each may leave its last block nearly empty, and its source's
        values = {"model": model, "device": task.device, "dtype": task.dtype, "kv_cache_tokens": num_tokens}
        self.runner: ModelRunner = load(TargetConfig(**values, max_slots=AT_ONCE), epoch=1).runner
        self.translation: Translation | None = None
        """Between its tokens and a target's, where they are others."""

    def drafts(self, ids: Sequence[int], start: int) -> Iterator[LawAt]:
        """Yield what `laws` does, over the target's tokens, which ids are."""
        return self.laws(ids, start) if self.translation is None else self._told_laws(self.translation, ids, start)

    def laws(self, ids: Sequence[int], start: int) -> Iterator[Callable[[SamplingParams], RowLaw]]:
        """Yield the laws after ids[:start], ids[:start + 1], ... ids[:-1]. The prompt is ids[:start]."""
        sequence = _Sequence(self.runner, ids[:start])
        try:
            sequence.ids += ids[start:-1]
            logits = self.runner.forward([sequence.row(len(ids) - start)])
        finally:
            sequence.free()
        host = HostLogits(logits)
        for index in range(len(ids) - start):
            yield partial(_law_of_logits, host, index)

    def _told_laws(self, translation: Translation, ids: Sequence[int], start: int) -> Iterator[LawAt]:
        """Yield each law from a forward of its own: with the next token, those before it may be told otherwise."""
        retokenization, sequence, num_same = translation.retokenization(), _Sequence(self.runner, ()), 0
        pool = self.runner.pool
        limit = min(self.runner.facts.context_limit, (pool.num_blocks - 1) * pool.block_size)
        try:
            for end in range(start, len(ids)):
                num_kept = retokenization.commit(ids[:end], num_same)
                num_same = end
                sequence.change(list(retokenization.ids), num_kept)
                if not retokenization.is_whole or len(sequence.ids) > limit:
                    yield _no_law
                    continue
                host = HostLogits(self.runner.forward([sequence.row(1)])).told(translation.logits)
                sequence.num_cached = len(sequence.ids)
                yield partial(_told_law, host)
        finally:
            sequence.free()

    def write(self, prompts: Sequence[Sequence[int]], count: int, params: Sequence[SamplingParams]) -> list[list[int]]:
        """Return prompt and answer of each, every token picked by coupled noise: an exact draw.

        An answer has `count` tokens, or ends with the first end-of-sequence id.
        """
        sequences = [_Sequence(self.runner, prompt) for prompt in prompts]
        unended = list(zip(sequences, params, strict=True))
        try:
            for _ in range(count):
                host = HostLogits(self.runner.forward([sequence.row(1) for sequence, _ in unended]))
                for row, (sequence, own) in enumerate(unended):
                    sequence.num_cached = len(sequence.ids)
                    law = host.law(row, LogitRow(SamplingState(own, (), ())))
                    sequence.ids.append(_best(law) if own.greedy else coupled_id(law, own, sequence.position))
                unended = [pair for pair in unended if pair[0].ids[-1] not in self.runner.facts.eos_token_ids]
                if not unended:
                    break
        finally:
            for sequence in sequences:
                sequence.free()
        written = [
            sequence.ids[len(prompt) - sequence.num_before :]
            for prompt, sequence in zip(prompts, sequences, strict=True)
        ]
        return [[*prompt, *ids] for prompt, ids in zip(prompts, written, strict=True)]


def _law_of_logits(host: HostLogits, index: int, params: SamplingParams) -> RowLaw:
    return host.law(index, LogitRow(SamplingState(params, (), ())))


def _told_law(host: HostLogits, params: SamplingParams) -> RowLaw | None:
    return host.law_if_any(0, LogitRow(SamplingState(params, (), ())))


def _no_law(params: SamplingParams) -> None:
    return None


def measure(task: Task) -> Iterator[dict[str, Any]]:
    """Yield the events; the last one has the rows. Raises OutriderError."""
    tokenizer = tokenizer_of(task.target)
    prompts = [tokenizer.encode(prompt).ids for prompt in task.prompts]
    for prompt, ids in zip(task.prompts, prompts, strict=True):
        if not ids:
            raise ConfigError(f"the prompt {prompt[:40]!r} has no token")
    longest = max(map(len, prompts)) + task.max_tokens
    yield {"event": "progress", "text": f"loading {task.target}"}
    target = LawModel(task.target, task, AT_ONCE * longest)
    _check_fits(target, longest, task)
    models: dict[str, LawModel] = {}
    tables: dict[str, drafting.Drafter] = {}
    for drafter in task.drafters:
        yield {"event": "progress", "text": f"loading {drafter.name}"}
        if drafter.kind == MODEL:
            assert drafter.source is not None
            models[drafter.name] = load_draft(target, drafter.source, task, longest)
        else:
            tables[drafter.name] = _table(drafter, tokenizer)
    rows = []
    for setting in task.settings:
        temperatures = draft_temperatures(setting.get("temperature", 1.0))
        tallies = {drafter.name: Tally(temperatures, task.leniences) for drafter in task.drafters}
        params = [
            SamplingParams(max_tokens=task.max_tokens, seed=SEED + i, acceptance=AcceptanceRule.COUPLED, **setting)  # type: ignore[arg-type]
            for i in range(len(prompts))
        ]
        for own in params[:1]:
            own.check(target.runner.facts.vocab_size)
        for first in range(0, len(prompts), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            yield {"event": "progress", "text": f"{_words(setting)}: prompt {first + 1} of {len(prompts)}"}
            sequences = target.write(prompts[part], task.max_tokens, params[part])
            for prompt, own, ids in zip(prompts[part], params[part], sequences, strict=True):
                _compare(target, models, tables, tallies, ids, len(prompt), own)
        rows += [tallies[drafter.name].row(drafter.name, setting) for drafter in task.drafters]
    yield {"event": "measured", "rows": rows}


def _compare(
    target: LawModel,
    models: dict[str, LawModel],
    tables: dict[str, drafting.Drafter],
    tallies: dict[str, Tally],
    ids: list[int],
    start: int,
    params: SamplingParams,
) -> None:
    """Compare all drafters along one answer: ids[start:] is the target's own."""
    whole = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    tokens = [
        TargetToken(ids[at], at, law(params), law(whole)) for at, law in enumerate(target.laws(ids, start), start=start)
    ]
    for name, tally in tallies.items():
        tally.begin()
        if name in models:
            laws: Iterable[LawAt] = models[name].drafts(ids, start)
        else:
            laws = _table_laws(tables[name], ids, start, target.runner.facts.vocab_size)
        for token, draft in zip(tokens, laws, strict=True):
            tally.add(token, draft, params)


def _table_laws(table: drafting.Drafter, ids: list[int], start: int, vocab_size: int) -> Iterator[LawAt]:
    """Yield the table's laws, under temperature and cuts as a model's; each holds until the next is asked for."""
    follower = table.open(ids[:start], start)
    for token_id in ids[start:]:
        yield partial(_law_of_counts, follower.walk().next(), vocab_size)
        follower.append([token_id])


def _law_of_counts(counts: drafting.Counts | None, vocab_size: int, params: SamplingParams) -> RowLaw | None:
    return None if counts is None else law_of_counts(counts, LogitRow(SamplingState(params, (), ())), vocab_size)


def _table(drafter: DrafterSpec, tokenizer: Any) -> drafting.Drafter:
    if drafter.kind in ("ngram", "lookup"):
        return Ngram() if drafter.kind == "ngram" else Lookup()
    assert drafter.source is not None
    try:
        with open(drafter.source, encoding="utf-8") as file:
            text_ids = tokenizer.encode(file.read()).ids
        return OF_TEXT[Drafter(drafter.kind)](text_ids)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{drafter.name}: {error}") from None


def tokenizer_of(model: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(tokenizer_files(model).tokenizer_json)


def have_same_tokens(target: str, draft: str) -> bool:
    """Return whether the models' tokens mean the same."""
    first, second = (tokenizer_fingerprint(tokenizer_files(model).tokenizer_json) for model in (target, draft))
    return first == second


def check_same_tokens(target: str, draft: str) -> None:
    """Raise ConfigError when the models' tokens mean different things."""
    if not have_same_tokens(target, draft):
        raise ConfigError(f"the tokenizers of {target} and {draft} differ; a draft must have its target's")


def load_draft(target: LawModel, source: str, task: Task, longest: int) -> LawModel:
    """Load a draft and what is between its tokens and the target's. Raises ConfigError."""
    family = _check_model(source)
    if family.name != MODEL or target.runner.facts.decoder_start_ids:
        check_same_tokens(task.target, source)
    is_same = have_same_tokens(task.target, source)
    draft = LawModel(source, task, longest if is_same else AT_ONCE * longest)  # of other tokens it may take more
    _check_start(target, draft)
    files = [tokenizer_files(model).tokenizer_json for model in (task.target, source)]
    facts = draft.runner.facts
    draft.translation = between(*files, target.runner.facts.vocab_size, facts.vocab_size, facts.eos_token_ids)
    if draft.translation is None:
        _check_fits(draft, longest, task)
    return draft


def _check_model(source: str) -> Family:
    family = family_of(Checkpoint(source))
    if family.network is not None:
        raise ConfigError(
            f"--draft {source}: a draft of the kind {family.name}, which alpha does not measure; it takes models. What "
            "a head is worth, `outrider train-head` reports and `outrider up` shows as spec_acceptance_rate"
        )
    return family


def _check_fits(model: LawModel, longest: int, task: Task) -> None:
    facts = model.runner.facts
    if longest > facts.context_limit:
        raise ConfigError(
            f"the longest prompt and {task.max_tokens} tokens are {longest}, the context limit of {facts.model_id} is "
            f"{facts.context_limit}; shorten the prompts or lower max_tokens"
        )


def _check_start(target: LawModel, draft: LawModel) -> None:
    facts, own = target.runner.facts, draft.runner.facts
    if facts.decoder_start_ids != own.decoder_start_ids:
        raise ConfigError(
            f"answers begin with {list(own.decoder_start_ids) or 'the prompt'} in {own.model_id} and with "
            f"{list(facts.decoder_start_ids) or 'the prompt'} in {facts.model_id}; "
            "use two encoder-decoder models, or two decoder-only ones"
        )


def _words(setting: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def main() -> int:
    return tell_all(lambda: measure(Task.read(sys.stdin.readline())))


if __name__ == "__main__":
    sys.exit(main())
