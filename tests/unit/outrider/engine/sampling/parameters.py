"""Parameters of sampling, drawn, and laws by them."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.wire.requests.params import SamplingParams

EOS = (7, 11)
PROMPT = (1, 2, 3, 2, 40)
OUTPUT = (5, 5, 2, 9)


def state(params: SamplingParams, output: tuple[int, ...] = OUTPUT, prompt: tuple[int, ...] = PROMPT) -> SamplingState:
    made = SamplingState(params, prompt, EOS)
    made.set_output(output)
    return made


TOGETHER = {
    "temperature": 0.8,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 2.0, 20: -1.0, 2: 1.0},
    "bad_words": ((4,), (2, 9, 30), (17, 18)),
    "min_tokens": 6,
    "stop_token_ids": (12,),
}


def params_of(values: dict[str, object]) -> SamplingParams:
    params = SamplingParams(max_tokens=100, **values)
    params.check(vocab_size=64)
    return params


INF = math.inf


@st.composite
def scores(draw: st.DrawFn, sizes: st.SearchStrategy[int] = st.integers(1, 300)) -> np.ndarray:  # noqa: B008
    """[N] float32, from peaked to flat; often with many equals, sometimes with bans, never with nothing left."""
    size, seed, scale = (
        draw(sizes),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from((0.01, 0.5, 2.0, 10.0, 60.0))),
    )
    generator = np.random.default_rng(seed)
    x = scale * generator.standard_normal(size)
    if step := draw(st.sampled_from((0.0, 0.25, 1.0, 100.0))):
        x = np.round(x / step) * step
    if draw(st.booleans()):
        x[generator.random(size) < 0.3] = -INF
    x[generator.integers(size)] = 1.5
    return x.astype(np.float32)


def dense(law: TokenDistribution) -> torch.Tensor:
    """[V] float64 probabilities."""
    probs = np.zeros(law.vocab_size)
    probs[slice(None) if law.ids is None else law.ids] = law.probs()
    return torch.from_numpy(probs)


def random_logits(num_rows: int, vocab_size: int = 64, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
