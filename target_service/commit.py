"""From an acceptance outcome to committed tokens: kinds, stops, length. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.wire.kinds import TokenKind
from outrider.wire.params import SamplingParams
from target_service.jobs import Finish


@dataclass(frozen=True, slots=True)
class Commit:
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    finish: Finish | None
    stop_token_id: int | None


def commit_tokens(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    num_output: int,
    draft_ids: Sequence[int],
    num_accepted: int,
    next_id: int,
) -> Commit:
    """Accepted drafts and the target's own token, cut at the first end-of-sequence id, stop id, or at max_tokens.

    `num_output` counts the output tokens before this round. A stop id stays as the last token; text leaves it out.
    """
    if num_accepted < len(draft_ids):
        last = TokenKind.RECOVERED
    else:
        last = TokenKind.BONUS if draft_ids else TokenKind.PLAIN
    tokens = [*draft_ids[:num_accepted], next_id]
    kinds = [*[TokenKind.ACCEPTED] * num_accepted, last]
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    for index, token_id in enumerate(tokens):
        num_now = num_output + index + 1
        if token_id in stops and num_now > params.min_tokens:
            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.STOP, token_id)
        if num_now >= params.max_tokens:
            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.LENGTH, None)
    return Commit(tuple(tokens), tuple(kinds), None, None)
