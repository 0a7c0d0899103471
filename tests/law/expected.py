"""The law that an answer must have, computed without the product: transformers' forward and logits processors.

Every prefix gets a forward of its own, without cache; penalties therefore see the prefix as committed text.
"""

import itertools
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.wire.requests.params import SamplingParams
from tests.grammars import END, WORDS, tokenizer_of
from tests.law.cases import GRAMMARS

Answer = tuple[int, ...]
Conditionals = dict[Answer, Tensor]
"""Output tokens so far -> law of the next one: [V] float64, sums to 1. One entry for every prefix that goes on."""
Law = dict[Answer, float]
"""Answer (or part of one) -> probability, zeros included: every sequence that the vocabulary can spell."""


@lru_cache(maxsize=4)
def load(path: str) -> PreTrainedModel:
    auto = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(path).is_encoder_decoder else AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def ends(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Ids that end an answer."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))


def conditionals(path: str, prompt_ids: Answer, params: SamplingParams) -> Conditionals:
    """The model's law after every prefix of up to max_tokens - 1 output tokens. An encoder reads the prompt, and the
    output goes on from the token that its decoder starts with.
    """
    model, source = load(path), {}
    if model.config.is_encoder_decoder:
        source, prompt_ids = {"input_ids": torch.tensor([prompt_ids])}, (model.config.decoder_start_token_id,)
    vocab_size, stops = model.config.vocab_size, ends(params, [model.config.eos_token_id])
    chain = _chain(len(prompt_ids), params, stops)
    goes_on = [i for i in range(vocab_size) if i not in stops]
    found: Conditionals = {}
    for length in range(params.max_tokens):
        prefixes = list(itertools.product(goes_on, repeat=length))
        ids = torch.tensor([[*prompt_ids, *prefix] for prefix in prefixes])  # [N, prompt + length] int64
        own = {name: each.expand(len(ids), -1) for name, each in source.items()} | {"decoder_input_ids": ids}
        with torch.inference_mode():
            output = model(**own, use_cache=False) if source else model(ids, use_cache=False)
        logits = output.logits[:, -1].double()  # [N, V]
        laws = _greedy(logits, ids, chain) if params.greedy else chain(ids, logits).softmax(dim=1)
        found.update(zip(prefixes, laws, strict=True))
    return found


def joint(laws: Conditionals, max_tokens: int) -> Law:
    """Of whole answers: the conditionals multiplied along the prefix. An answer ends where no prefix goes on."""
    open_, whole = {(): 1.0}, {}
    for _ in range(max_tokens):
        grown = {(*p, i): w * q for p, w in open_.items() for i, q in enumerate(laws[p].tolist())}
        whole.update({a: w for a, w in grown.items() if a not in laws})
        open_ = {a: w for a, w in grown.items() if a in laws}
    return whole


class _OutputPenalties(LogitsProcessor):
    """OpenAI's formula: logit - frequency * count - presence * (count > 0), counts over the output; then the bias."""

    def __init__(self, num_prompt: int, params: SamplingParams) -> None:
        self._num_prompt = num_prompt
        self._params = params

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[:, self._num_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        scores = scores - self._params.frequency_penalty * counts - self._params.presence_penalty * (counts > 0)
        for token_id, bias in self._params.logit_bias.items():
            scores[:, token_id] += bias
        return scores


class _Grammar(LogitsProcessor):
    """Leaves what a grammar allows behind the output, which it reads from its beginning. What follows an output that it
    does not allow is left as it is: no answer begins so.
    """

    def __init__(self, num_prompt: int, grammar: str) -> None:
        self._num_prompt = num_prompt
        tokenizer = LLTokenizer(tokenizer_of().to_str(), n_vocab=len(WORDS), eos_token=[END])
        self._start = LLMatcher(tokenizer, GRAMMARS[grammar], log_level=0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self._num_prompt :].tolist(), strict=True):
            matcher = self._start.deep_copy()
            if matcher.try_consume_tokens(ids) == len(ids):
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                allowed = np.unpackbits(bits, count=len(row), bitorder="little").astype(bool)
                row[torch.from_numpy(~allowed)] = -torch.inf
        return scores


def _chain(num_prompt: int, params: SamplingParams, stops: frozenset[int]) -> LogitsProcessorList:
    """In the order that `outrider/engine/sampling/device_sampling.py` and `penalties.py` promise."""
    chain: list[LogitsProcessor] = [_Grammar(num_prompt, params.grammar)] if params.grammar else []
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(_OutputPenalties(num_prompt, params))
    if params.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens and stops:
        chain.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, sorted(stops)))
    if params.greedy:
        return LogitsProcessorList(chain)
    chain.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chain.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(chain)


def _greedy(logits: Tensor, ids: Tensor, chain: LogitsProcessorList) -> Tensor:
    processed = chain(ids, logits)
    return torch.zeros_like(processed).scatter_(1, processed.argmax(dim=1, keepdim=True), 1.0)
