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

    token_ids: list[int]
    kinds: list[TokenKind]
    finish: Finish | None


def kind_of_next(num_drafted: int, is_path_accepted: bool) -> TokenKind:
    """Return the kind of the target's own token. is_path_accepted: no draft token follows the last accepted one."""
    if not num_drafted:
        return TokenKind.PLAIN
    if is_path_accepted:
        return TokenKind.BONUS
    return TokenKind.RECOVERED


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
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids.update(eos_token_ids)
    token_ids, finish = list[int](), None
    for token_id in (*accepted_ids, next_id):
        token_ids.append(token_id)
        num_now = num_output + len(token_ids)
        if token_id in stop_ids and (num_now > params.min_tokens or params.grammar):  # which wins over min_tokens
            finish = Finish.STOP
        elif num_now >= params.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            break
    kinds = [TokenKind.ACCEPTED] * len(token_ids)
    if len(token_ids) > len(accepted_ids):
        kinds[-1] = last
    return Commit(token_ids, kinds, finish)
