"""Block verification as its paper writes it, for tests to compare with. NumPy, whole laws, a slot at a time."""

from collections.abc import Callable, Sequence

import numpy as np

from outrider.engine.sampling.coupled import uniforms
from outrider.wire.requests.params import SamplingParams


def verdict(
    target: Sequence[np.ndarray],
    draft: Sequence[np.ndarray],
    draft_ids: Sequence[int],
    u: Callable[[int], float],
    own: Callable[[int, np.ndarray], int],
) -> tuple[int, int]:
    """Sun et al. 2025, Algorithm 2. target [K + 1] and draft [K] laws, [V] float64 each; u(j): what the j-th draft is
    kept with; own(j, weights): the id that is drawn there else -> (num_accepted, next id).
    """
    num = len(draft_ids)
    p, left, chances = [1.0], list[np.ndarray](), list[float]()
    for j, token_id in enumerate(draft_ids):
        left.append(np.maximum(p[j] * target[j] - draft[j], 0.0))
        p.append(min(1.0, p[j] * target[j][token_id] / draft[j][token_id]))
    for n in range(1, num + 1):
        mass = left[n].sum() if n < num else 0.0
        chances.append(p[n] if n == num else mass / max(mass + 1 - p[n], 1e-300))
    tau = max((n for n in range(1, num + 1) if u(n - 1) < chances[n - 1]), default=0)
    if tau == num:
        return num, own(num, target[num])
    return tau, own(tau, left[tau])


def gumbel_max(weights: np.ndarray, params: SamplingParams, position: int) -> int:
    """What the numbers of a position draw by weights [V], not normalised."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(weights) - np.log(-np.log(uniforms(params, position, len(weights))))))
