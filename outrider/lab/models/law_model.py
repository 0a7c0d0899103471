"""`DistributionModel`, which runs a draft or a target along whole sequences and returns its distribution at each token.
Used by `alpha`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from outrider.drafting.translation import Translation
from outrider.engine.attention.varlen_attention import BLOCK_SIZE
from outrider.engine.loading.loaded import load
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.step_plan import EncoderSource, Row
from outrider.lab.models.alpha_task import AlphaTask
from outrider.lab.models.tally import DistributionAt, best_id
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig

AT_ONCE = 8
"""Number of prompts for which the target generates outputs in one batch."""


class _Sequence:
    """A prompt and its output so far, in the KV cache. If the model has an encoder, that reads the prompt at
    the start.
    """

    def __init__(self, runner: ModelRunner, prompt: Sequence[int]) -> None:
        start = runner.facts.decoder_start_ids
        self.ids = list(start or prompt)
        """Token ids that the decoder is fed: the prompt (with an encoder, the start ids instead), then the output."""
        self.num_cached = 0
        self.num_before = len(prompt) - len(self.ids)
        """Number to add to an index in `ids` to get the index in the sequence of prompt and output: 0 without an
        encoder, otherwise the number of prompt tokens minus that of the decoder's start ids."""
        self._table = runner.pool.new_table()
        self._source: EncoderSource | None = None
        if start:
            self._source = EncoderSource(runner.pool.new_table(), list(prompt))
            runner.forward([Row(self._table, (), 0, 0, (), source=self._source)])

    @property
    def position(self) -> int:
        # of the next token, prompt counted
        return self.num_before + len(self.ids)

    def row(self, num_logits: int) -> Row:
        return Row.of(self._table, self.ids, self.num_cached, num_logits, self._source)

    def replace_ids(self, ids: list[int], num_same: int) -> None:
        # the first `num_same` tokens are as they were; the last one is always fed again
        self.ids = ids
        self.num_cached = min(self.num_cached, num_same, len(ids) - 1)
        self._table.truncate(self.num_cached)

    def free(self) -> None:
        self._table.free()
        if self._source is not None:
            self._source.table.free()


class DistributionModel:
    """A draft or target model that returns its next-token distribution after each token of a given sequence."""

    def __init__(self, model: str, task: AlphaTask, num_tokens: int) -> None:
        """Load the model on the device and in the dtype of `task`.

        num_tokens: maximum number of tokens in the KV cache, of all sequences together (at most AT_ONCE). Raises
        ConfigError for a model that cannot be loaded.
        """
        num_tokens += 2 * AT_ONCE * BLOCK_SIZE  # the last block of a sequence, and of its source, may be nearly empty
        values = {"model": model, "device": task.device, "dtype": task.dtype, "kv_cache_tokens": num_tokens}
        self.runner: ModelRunner = load(TargetConfig(**values, max_slots=AT_ONCE), epoch=1).runner
        self.translation: Translation | None = None
        """Map between this draft's tokens and the target's; None = they are the same, or this is the target."""

    def drafts(self, ids: Sequence[int], start: int) -> Iterator[DistributionAt]:
        """Yield one function for each token of the output. The function takes sampling parameters and returns the
        draft's distribution at that token's position. The distribution is over the target's vocabulary, even if the
        draft has another tokenizer.

        The function returns None if the draft's tokenizer cannot express the sequence before that position in whole
        tokens, or if the draft's context is too short for it. ids: prompt and output in the target's tokens. start:
        number of prompt tokens.
        """
        if self.translation is None:
            return self.distributions(ids, start)
        return self._retokenized_distributions(self.translation, ids, start)

    def distributions(self, ids: Sequence[int], start: int) -> Iterator[Callable[[SamplingParams], TokenDistribution]]:
        """Yield one function for each token of the output. The function takes sampling parameters and returns this
        model's distribution at that token's position. The first function gives the distribution after ids[:start], the
        last one that after ids[:-1].

        ids: prompt and output. start: number of prompt tokens.
        """
        sequence = _Sequence(self.runner, ids[:start])
        try:
            sequence.ids += ids[start:-1]
            logits = self.runner.forward([sequence.row(len(ids) - start)])  # [len(ids) - start, V] float32
        finally:
            sequence.free()
        host = HostLogits(logits)
        for index in range(len(ids) - start):
            yield partial(_distribution_of_logits, host, index)

    def _retokenized_distributions(
        self, translation: Translation, ids: Sequence[int], start: int
    ) -> Iterator[DistributionAt]:
        # a forward for each token: with the next token, those before it may be retokenized in another way
        retokenization = translation.retokenization()
        sequence = _Sequence(self.runner, ())
        num_same = 0
        pool = self.runner.pool
        limit = min(self.runner.facts.context_limit, (pool.num_blocks - 1) * pool.block_size)
        try:
            for end in range(start, len(ids)):
                num_kept = retokenization.commit(ids[:end], num_same)
                num_same = end
                sequence.replace_ids(list(retokenization.ids), num_kept)
                if not retokenization.is_whole or len(sequence.ids) > limit:
                    yield _no_distribution
                    continue
                host = HostLogits(self.runner.forward([sequence.row(1)])).convert(translation.logits)
                sequence.num_cached = len(sequence.ids)
                yield partial(_retokenized_distribution, host)
        finally:
            sequence.free()

    def write(self, prompts: Sequence[Sequence[int]], count: int, params: Sequence[SamplingParams]) -> list[list[int]]:
        """Generate an output for each prompt. Return the token ids of each prompt, followed by those of its output.

        count: maximum number of output tokens; an output ends earlier with an end-of-sequence id. params: sampling
        parameters of each prompt. Tokens are drawn with the random numbers of the rule `coupled`, which is exact; at
        temperature 0 the most likely token is taken.
        """
        sequences = [_Sequence(self.runner, prompt) for prompt in prompts]
        running = list(zip(sequences, params, strict=True))
        try:
            for _ in range(count):
                host = HostLogits(self.runner.forward([sequence.row(1) for sequence, _ in running]))
                for row, (sequence, sampling) in enumerate(running):
                    sequence.num_cached = len(sequence.ids)
                    distribution = _distribution_of_logits(host, row, sampling)
                    if sampling.greedy:
                        token_id = best_id(distribution)
                    else:
                        token_id = coupled_id(distribution, sampling, sequence.position)
                    sequence.ids.append(token_id)
                running = [pair for pair in running if pair[0].ids[-1] not in self.runner.facts.eos_token_ids]
                if not running:
                    break
        finally:
            for sequence in sequences:
                sequence.free()
        texts = []
        for prompt, sequence in zip(prompts, sequences, strict=True):
            output = sequence.ids[len(prompt) - sequence.num_before :]
            texts.append([*prompt, *output])
        return texts


def _distribution_of_logits(host: HostLogits, index: int, params: SamplingParams) -> TokenDistribution:
    return host.distribution(index, LogitRow(SamplingState(params, (), ())))


def _retokenized_distribution(host: HostLogits, params: SamplingParams) -> TokenDistribution | None:
    return host.distribution_if_any(0, LogitRow(SamplingState(params, (), ())))


def _no_distribution(_params: SamplingParams) -> None:
    return None
