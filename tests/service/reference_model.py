"""What the target must answer, from transformers' own forward without a cache and a few lines of NumPy."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.sampling.device_sampling import distributions
from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_unchecked
from outrider.wire.requests.params import SamplingParams
from tests import block_rule
from tests.block_rule import gumbel_max


class ReferenceModel:
    """`prompt` counts tokens of the prompt among `ids` wherever penalties need it."""

    def __init__(self, folder: str, eos_token_ids: tuple[int, ...] = (0,)) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32."""
        return self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The next `count` ids."""
        sequence = list(ids)
        for _ in range(count):
            sequence.append(int(self.logits(sequence)[-1].argmax()))
        return sequence[len(ids) :]

    def laws(self, ids: Sequence[int], num_prompt: int, params: SamplingParams, drafts: Sequence[int]) -> torch.Tensor:
        """[K + 1, V] float32 log-probs: the processed law at each draft position and after them."""
        state = SamplingState(params, ids[:num_prompt], self._eos_token_ids)
        state.set_output(list(ids[num_prompt:]))
        rows = [LogitRow(state, tuple(drafts[:j])) for j in range(len(drafts) + 1)]
        raw = self.logits([*ids, *drafts])[len(ids) - 1 :]
        return distributions(process_unchecked(raw, rows), rows)

    def next_id(self, ids: Sequence[int], num_prompt: int, params: SamplingParams) -> int:
        """What a plain step answers."""
        law = self.laws(ids, num_prompt, params, [])[0]
        return gumbel_max(_probs(law), params, len(ids))

    def next_ids(self, prompt: Sequence[int], params: SamplingParams, ids: Sequence[int]) -> list[int]:
        """What plain steps answer after the prompt and each beginning of `ids`, the whole but for its last."""
        laws = self.laws(prompt, len(prompt), params, ids[:-1])
        return [gumbel_max(_probs(law), params, len(prompt) + j) for j, law in enumerate(laws)]

    def verdict(
        self,
        ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        drafts: Sequence[int],
        draft_log_probs: torch.Tensor,
    ) -> tuple[int, list[int]]:
        """(num_accepted, committed ids) by block."""
        target = [_probs(row) for row in self.laws(ids, num_prompt, params, drafts)]
        draft, start = [_probs(row) for row in draft_log_probs[: len(drafts)]], len(ids)
        num, next_id = block_rule.verdict(
            target,
            draft,
            drafts,
            lambda j: uniform(params, start, start + j, NoiseStream.ACCEPT),
            lambda j, weights: gumbel_max(weights, params, start + j),
        )
        return num, [*drafts[:num], next_id]


def uniform(params: SamplingParams, committed_len: int, position: int, purpose: NoiseStream) -> float:
    return float(host_slot_uniforms([params], [committed_len], [position], [purpose])[0, 0])


def draw(log_probs: torch.Tensor, u: float) -> int:
    """log_probs [V] float32; inverse CDF in id order."""
    weights = _probs(log_probs)
    cdf = np.cumsum(weights)
    return int(np.argmax((cdf > u * cdf[-1]) & (weights > 0)))


def _probs(log_probs: torch.Tensor) -> np.ndarray:
    weights = np.exp(log_probs.double().numpy())
    return weights / weights.sum()
