"""What a decision commits: the tokens up to the first stop, and the kind of each. Called by `sampled` and
`searching`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.wire.kinds import TokenKind
from outrider.wire.requests.params import SamplingParams
from target_service.leases.lease_jobs import Finish


def kinds_of(num_accepted: int, num_drafted: int, is_path_accepted: bool) -> list[TokenKind]:
    """Return the kinds of num_accepted accepted draft tokens and, as the last entry, the kind of the target's own token
    after them: recovered, bonus, or plain if nothing was drafted.

    num_drafted: number of verified draft tokens. is_path_accepted: whether no draft token followed the last accepted
    one.

        2 accepted of 3 drafted, path not accepted: [ACCEPTED, ACCEPTED, RECOVERED]
    """
    own = TokenKind.RECOVERED
    if not num_drafted:
        own = TokenKind.PLAIN
    elif is_path_accepted:
        own = TokenKind.BONUS
    return [TokenKind.ACCEPTED] * num_accepted + [own]


def commit_tokens(
    params: SamplingParams, eos_token_ids: Sequence[int], num_output: int, decided_ids: Sequence[int]
) -> tuple[list[int], Finish | None]:
    """Return the decided tokens up to the first stop id or up to max_tokens, and the finish reason. The reason is None
    if the output continues.

    num_output: number of output tokens before this round. decided_ids: accepted draft tokens and the target's own
    token. A stop id is the last token returned, though the output's text leaves it out.
    """
    stop_ids = params.stop_ids(eos_token_ids)
    token_ids = list[int]()
    finish = None
    for num_now, token_id in enumerate(decided_ids, start=num_output + 1):
        token_ids.append(token_id)
        if token_id in stop_ids and (num_now > params.min_tokens or params.grammar):  # a grammar wins over min_tokens
            finish = Finish.STOP
        elif num_now >= params.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            break
    return token_ids, finish
