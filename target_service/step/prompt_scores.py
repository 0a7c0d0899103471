"""Score the tokens of prompts: the log-prob of each token given those before it.

It needs no forward of its own: the prompt of such a slot is prefilled without the prefix cache, and the rows of its
pieces have logits. Called by `verifier` and `step`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.host_copy import to_host
from outrider.engine.sampling.reported import Reported, pack_ranks, unpack_ranks
from outrider.engine.worker.jobs import JobError, JobFault, OpenJob
from outrider.engine.worker.scheduler import Chunk
from outrider.engine.worker.slots import PromptScores, Slot


def scoring_refusal(job: OpenJob) -> JobError | None:
    """Return the error for a job that asks for log-probs of its prompt in a beam search, or of a prompt that an encoder
    reads, which have none. None = the job may run.
    """
    if job.num_prompt_logprobs is None:
        return None
    if job.params.beams is not None:
        why = "use_beam_search is true, and num_prompt_logprobs given, which is not of beams"
    elif job.source_ids:
        why = (
            "num_prompt_logprobs is given, and this model's prompts are read by an encoder, which returns no log-probs"
        )
    else:
        return None
    return JobError(JobFault.INVALID, f"{why}; leave it out")


def begin_scoring(job: OpenJob, slot: Slot) -> None:
    """Have the log-probs of a new slot's prompt tokens computed while the prompt is prefilled, if the slot's job has
    num_prompt_logprobs.
    """
    if job.num_prompt_logprobs is not None:
        slot.scoring = PromptScores(slot.num_prompt - 1, job.num_prompt_logprobs)


def note_scores(pieces: Sequence[Chunk], logits: Tensor) -> list[Slot]:
    """Record the log-probs of the prompt tokens of a forward, for the slots whose requests ask for them. Return the
    slots among these whose logits are NaN or infinite.

    pieces: pieces of prompts in the forward. logits: [R, V] float32, the rows of the pieces in order.
    """
    scored = list[tuple[Slot, PromptScores]]()
    rankings = list[Tensor]()
    sizes = [piece.row.num_logits for piece in pieces]
    for piece, own in zip(pieces, logits.split(sizes), strict=True):  # own: [num_logits, V]
        slot = piece.slot
        scoring = slot.scoring
        if not len(own) or scoring is None:
            continue
        first = 1 + len(scoring.found)
        ids = slot.committed[first : first + min(len(own), slot.num_unscored)]
        scored.append((slot, scoring))
        rankings.append(pack_ranks(own[: len(ids)], ids, scoring.num_best))  # [len(ids), 3 + 2 num_best] float64
    failed = list[Slot]()
    if not scored:
        return failed
    for (slot, scoring), ranking in zip(scored, to_host(*rankings), strict=True):  # one wait for all pieces
        ranks = unpack_ranks(ranking.numpy(), scoring.num_best)
        if ranks is None:
            failed.append(slot)
        else:
            scoring.found += ranks
    return failed


def pop_scores(slot: Slot) -> Sequence[tuple[Reported, int]]:
    """Return, for each prompt token from the second on, its log-probs and its rank (1 = likeliest), and remove them
    from the slot: only the slot's first verdict reports them.
    """
    scoring = slot.scoring
    slot.scoring = None
    if scoring is None:
        return ()
    return scoring.found
