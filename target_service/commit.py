"""What a step's decision commits: cut at the first stop, and what each token is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.wire.kinds import TokenKind
from outrider.wire.params import SamplingParams
from target_service.jobs import Finish


@dataclass(frozen=True, slots=True)
class Commit:
    """The tokens that one round commits."""

    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    finish: Finish | None
    stop_token_id: int | None


def kind_of_next(num_drafted: int, all_kept: bool) -> TokenKind:
    """Return the kind of the target's own token. all_kept: to the end of the proposal, or of a tree's branch."""
    if not num_drafted:
        return TokenKind.PLAIN
    return TokenKind.BONUS if all_kept else TokenKind.RECOVERED


def commit_tokens(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    num_output: int,
    accepted_ids: Sequence[int],
    next_id: int,
    last: TokenKind,
) -> Commit:
    """Commit accepted drafts and the target's own token, cut at the first end-of-sequence or stop id or max_tokens.

    `num_output` counts the output tokens before this round; `last` is the kind of next_id. A stop id stays as the last
    token; text leaves it out.
    """
    tokens = [*accepted_ids, next_id]
    kinds = [*[TokenKind.ACCEPTED] * len(accepted_ids), last]
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    for index, token_id in enumerate(tokens):
        num_now = num_output + index + 1
        if token_id in stops and (num_now > params.min_tokens or params.grammar):  # which wins over min_tokens
            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.STOP, token_id)
        if num_now >= params.max_tokens:
            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.LENGTH, None)
    return Commit(tuple(tokens), tuple(kinds), None, None)
