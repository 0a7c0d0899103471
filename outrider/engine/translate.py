"""Protobuf to jobs and back, for what both servicers share. No maths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.engine.jobs import CloseJob, Fault, JobError, OpenJob, TruncateJob
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TRUNCATE_REASONS
from outrider.wire.params import SamplingParams, drafter_of

_CODES = {
    Fault.UNKNOWN_SLOT: pb.WORKER_ERROR_CODE_UNKNOWN_SLOT,
    Fault.BEHIND: pb.WORKER_ERROR_CODE_BEHIND,
    Fault.STALE_EPOCH: pb.WORKER_ERROR_CODE_STALE_EPOCH,
    Fault.EXHAUSTED: pb.WORKER_ERROR_CODE_EXHAUSTED,
    Fault.INVALID: pb.WORKER_ERROR_CODE_INVALID,
    Fault.INTERNAL: pb.WORKER_ERROR_CODE_INTERNAL,
    Fault.CANCELLED: pb.WORKER_ERROR_CODE_CANCELLED,
    Fault.DRAINING: pb.WORKER_ERROR_CODE_DRAINING,
}


def error_to_proto(error: JobError) -> pb.WorkerError:
    return pb.WorkerError(code=_CODES[error.fault], message=error.message, known_len=error.known_len)


def stale_epoch(got: int, own: int) -> JobError:
    return JobError(Fault.STALE_EPOCH, f"message is for epoch {got}, this worker's is {own}; open the slot again")


def draining() -> JobError:
    return JobError(Fault.DRAINING, "this worker takes no new slots because it is about to stop; open it elsewhere")


def no_item() -> JobError:
    return JobError(Fault.INVALID, "message has no item, or one that this worker does not know; set exactly one")


def open_job(owner: int, message: pb.OpenSlot, respond: Callable[[Any], None]) -> OpenJob:
    return OpenJob(
        owner=owner,
        slot_id=message.slot,
        committed_ids=tuple(message.committed_ids),
        num_prompt=message.num_prompt_tokens,
        params=SamplingParams.from_proto(message.params),
        respond=respond,
        cache_salt=message.cache_salt,
        deliver_to=message.deliver_to,
        target_epoch=message.target_epoch,
        drafter=drafter_of(message.drafter, "drafter"),
    )


def truncate_job(owner: int, message: pb.Truncate) -> TruncateJob:
    reason = TRUNCATE_REASONS.get(message.reason, "unspecified")  # a newer gateway may know more
    return TruncateJob(owner, message.slot, message.committed_len, reason)


def close_job(owner: int, message: pb.CloseSlot) -> CloseJob:
    return CloseJob(owner, message.slot)
