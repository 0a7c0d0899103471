"""Measure how often a target would accept the draft tokens of drafters: the process that `outrider alpha` starts.

    python -m outrider.lab.models.alpha

It reads one line of JSON on stdin, an `AlphaTask`, and writes lines on stdout: {"event": "progress", "text"}, and at
the end {"event": "measured", "rows": [...]} with one `Tally.row` for each drafter and setting, or {"event": "failed",
"message"}.

The target generates an output to each prompt under each setting. At each token of the output, the distribution of every
drafter is compared with the target's, both after the same tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.drafting import sequence_drafter as drafting
from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.translation import create_translation
from outrider.engine.drafter_table import TEXT_TABLES
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.kinds import HeadKind, kind_of
from outrider.engine.sampling.count_distribution import distribution_of_counts
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.lab.models.alpha_task import MODEL, AlphaTask, DrafterSpec
from outrider.lab.models.law_model import AT_ONCE, DistributionModel
from outrider.lab.models.tally import DistributionAt, Tally, TargetToken, draft_temperatures
from outrider.wire.errors import ConfigError
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.models.fingerprint import tokenizer_fingerprint
from outrider.wire.processes.processes import write_events
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams

SEED = 20230101
"""Seed with which the target's output for the first prompt is drawn. Prompt i, counted from 0, has the seed SEED + i.
"""

Event = dict[str, Any]
"""Event that this child process reports to its parent: a JSON object that is written to stdout as one line. The key
"event" has its kind: "progress", "measured" or "failed"."""


@dataclass(frozen=True)
class _Models:
    """The loaded models and tables of a measurement."""

    target: DistributionModel
    drafts: dict[str, DistributionModel]
    """Draft models by drafter name."""
    tables: dict[str, drafting.SequenceDrafter]
    """Drafters without a model, by drafter name."""


def measure(task: AlphaTask) -> Iterator[Event]:
    """Measure the acceptance of the drafters of `task`. Yield events on the progress, and at the end the event
    "measured" with all rows of the report.

    Raises OutriderError for a model or drafter that cannot be measured.
    """
    tokenizer = tokenizer_of(task.target)
    prompts: list[list[int]] = []
    for prompt in task.prompts:
        ids = tokenizer.encode(prompt).ids
        if not ids:
            raise ConfigError(f"the prompt {prompt[:40]!r} has no token")
        prompts.append(ids)
    longest = max(map(len, prompts)) + task.max_tokens
    yield {"event": "progress", "text": f"loading {task.target}"}
    target = DistributionModel(task.target, task, AT_ONCE * longest)
    _check_len(target, longest, task)
    models = _Models(target, {}, {})
    for drafter in task.drafters:
        yield {"event": "progress", "text": f"loading {drafter.name}"}
        if drafter.kind == MODEL:
            assert drafter.source is not None
            models.drafts[drafter.name] = load_draft(target, drafter.source, task, longest)
        else:
            models.tables[drafter.name] = _create_table(drafter, tokenizer)
    rows = []
    for setting in task.settings:
        rows += yield from _measure_setting(task, models, prompts, setting)
    yield {"event": "measured", "rows": rows}


def _measure_setting(
    task: AlphaTask, models: _Models, prompts: Sequence[list[int]], setting: dict[str, float]
) -> Generator[Event, None, list[dict[str, Any]]]:
    """Measure under one sampling setting: yield events on the progress, and return the rows."""
    temperatures = draft_temperatures(setting.get("temperature", 1.0))
    tallies = {drafter.name: Tally(temperatures, task.leniences) for drafter in task.drafters}
    params = []
    for index in range(len(prompts)):
        sampling = SamplingParams(
            max_tokens=task.max_tokens,
            seed=SEED + index,
            acceptance=AcceptanceRule.COUPLED,
            **setting,  # type: ignore[arg-type]
        )
        params.append(sampling)
    params[0].check(models.target.runner.facts.vocab_size)
    for first in range(0, len(prompts), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        yield {"event": "progress", "text": f"{_describe(setting)}: prompt {first + 1} of {len(prompts)}"}
        texts = models.target.write(prompts[part], task.max_tokens, params[part])
        for prompt, sampling, ids in zip(prompts[part], params[part], texts, strict=True):
            _compare(models, tallies, ids, len(prompt), sampling)
    return [tallies[drafter.name].row(drafter.name, setting) for drafter in task.drafters]


def _compare(models: _Models, tallies: dict[str, Tally], ids: list[int], start: int, params: SamplingParams) -> None:
    # all drafters along one text, whose output is ids[start:]
    whole_params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    tokens = []
    for position, distribution in enumerate(models.target.distributions(ids, start), start=start):
        tokens.append(TargetToken(ids[position], position, distribution(params), distribution(whole_params)))
    for name, tally in tallies.items():
        tally.begin()
        if name in models.drafts:
            distributions: Iterable[DistributionAt] = models.drafts[name].drafts(ids, start)
        else:
            distributions = _table_distributions(models.tables[name], ids, start, models.target.runner.facts.vocab_size)
        for token, draft in zip(tokens, distributions, strict=True):
            tally.add(token, draft, params)


def _table_distributions(
    table: drafting.SequenceDrafter, ids: list[int], start: int, vocab_size: int
) -> Iterator[DistributionAt]:
    """Yield a table's distribution at each token of the output ids[start:]. Each is valid until the next is yielded."""
    follower = table.open(ids[:start], start)
    for token_id in ids[start:]:
        yield partial(_distribution_of_counts, follower.walk().next(), vocab_size)
        follower.append([token_id])


def _distribution_of_counts(
    counts: drafting.Counts | None, vocab_size: int, params: SamplingParams
) -> TokenDistribution | None:
    if counts is None:
        return None
    return distribution_of_counts(counts, LogitRow(SamplingState(params, (), ())), vocab_size)


def _create_table(drafter: DrafterSpec, tokenizer: Any) -> drafting.SequenceDrafter:
    if drafter.kind == "ngram":
        return Ngram()
    if drafter.kind == "lookup":
        return Lookup()
    assert drafter.source is not None
    try:
        with open(drafter.source, encoding="utf-8") as file:
            text_ids = tokenizer.encode(file.read()).ids
        return TEXT_TABLES[Drafter(drafter.kind)](text_ids)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{drafter.name}: {error}") from None


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model, given as a folder, GGUF file or hub id. Raises ConfigError if it has none."""
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(tokenizer_files(model).tokenizer_json)


def have_same_tokens(target: str, draft: str) -> bool:
    """Return whether both models have the same token for every token id. target, draft: folder, GGUF file or hub id of
    each.
    """
    return _fingerprint(target) == _fingerprint(draft)


def _fingerprint(model: str) -> str:
    return tokenizer_fingerprint(tokenizer_files(model).tokenizer_json)


def check_same_tokens(target: str, draft: str) -> None:
    """Raise ConfigError unless both models have the same token for every token id. target, draft: folder, GGUF file or
    hub id of each.
    """
    if not have_same_tokens(target, draft):
        raise ConfigError(f"the tokenizers of {target} and {draft} differ; a draft must have its target's")


def load_draft(target: DistributionModel, source: str, task: AlphaTask, longest: int) -> DistributionModel:
    """Load a draft model. If its tokenizer differs from the target's, also make the map between the token ids of both,
    by which the draft's distributions are converted to the target's vocabulary.

    source: folder or hub id of the draft. task: settings of the measurement. longest: length of the longest prompt with
    its output, in the target's tokens.

    Raises ConfigError for a head, and for a draft that is not compatible with the target.
    """
    kind = _check_model(source)
    if kind.name != MODEL or target.runner.facts.decoder_start_ids:
        check_same_tokens(task.target, source)
    num_tokens = longest
    if not have_same_tokens(task.target, source):
        num_tokens = AT_ONCE * longest  # a text may have more of the draft's tokens
    draft = DistributionModel(source, task, num_tokens)
    _check_start(target, draft)
    facts = draft.runner.facts
    draft.translation = create_translation(
        tokenizer_files(task.target).tokenizer_json,
        tokenizer_files(source).tokenizer_json,
        target.runner.facts.vocab_size,
        facts.vocab_size,
        facts.eos_token_ids,
    )
    if draft.translation is None:
        _check_len(draft, longest, task)
    return draft


def _check_model(source: str) -> HeadKind:
    kind = kind_of(Checkpoint(source))
    if kind.network is not None:
        raise ConfigError(
            f"--draft {source}: a draft of the kind {kind.name}, which alpha does not measure; it takes models. What "
            "a head is worth, `outrider train-head` reports and `outrider up` shows as spec_acceptance_rate"
        )
    return kind


def _check_len(model: DistributionModel, longest: int, task: AlphaTask) -> None:
    facts = model.runner.facts
    if longest > facts.context_limit:
        raise ConfigError(
            f"the longest prompt and {task.max_tokens} tokens are {longest}, the context limit of {facts.model_id} is "
            f"{facts.context_limit}; shorten the prompts or lower max_tokens"
        )


def _check_start(target: DistributionModel, draft: DistributionModel) -> None:
    target_facts = target.runner.facts
    draft_facts = draft.runner.facts
    if target_facts.decoder_start_ids != draft_facts.decoder_start_ids:
        raise ConfigError(
            f"answers begin with {list(draft_facts.decoder_start_ids) or 'the prompt'} in {draft_facts.model_id} and "
            f"with {list(target_facts.decoder_start_ids) or 'the prompt'} in {target_facts.model_id}; "
            "use two encoder-decoder models, or two decoder-only ones"
        )


def _describe(setting: dict[str, float]) -> str:
    # temperature 0.6, top_p 0.9
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def main() -> int:
    """Read an `AlphaTask` as JSON from stdin, measure, and write events to stdout. Return the exit code, 0 or 1."""
    return write_events(lambda: measure(AlphaTask.read(sys.stdin.readline())))


if __name__ == "__main__":
    sys.exit(main())
