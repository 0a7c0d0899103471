"""The reference target of a served model, with which its other targets and its drafts are compared.

`ServedModel` creates it from the first target of its pool that connects.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio

from gateway.tokenizer import Tokenizer
from gateway.workers.drafts.comparison import difference_between
from gateway.workers.links import WorkerLink
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import IncompatiblePair
from outrider.wire.models.pair import describe_incompatibility, is_compatible
from outrider.wire.transport.rpc import describe_failure


@dataclass(frozen=True, slots=True)
class ReferenceTarget:
    """The first target of a pool that connected. All other targets and draft workers of the model must be compatible
    with it.
    """

    info: pb.WorkerInfo
    files: pb.TokenizerFiles
    tokenizer: Tokenizer
    model_path: str
    """Path or hub id with which the target's worker was started. It distinguishes two folders of the same name. Users
    do not see it."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time when the target first connected, in Unix seconds."""
    comparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a draft worker's tokenizer is fetched and compared: only one comparison runs at a time."""

    def check_target(self, info: pb.WorkerInfo, model_path: str) -> None:
        """Raise IncompatiblePair if another target of the pool differs from this one.

        info, model_path: WorkerInfo and model path of the other target.
        """
        first = self.info
        if info.vocab_size != first.vocab_size or info.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise IncompatiblePair(
                f"the target {info.model_id} has vocabulary {info.vocab_size} {info.tokenizer_fingerprint[:12]}, "
                f"the pool was started with {first.vocab_size} {first.tokenizer_fingerprint[:12]}"
            )
        if _identity(info) != _identity(first):
            raise IncompatiblePair(
                f"the target came back as {_identity(info)}, the pool was started with {_identity(first)}; "
                "restart the gateway to serve another model"
            )
        if model_path != self.model_path:
            raise IncompatiblePair(
                f"the target is of another folder named {info.model_id} than the one the pool was started with; give "
                "all targets of a pool one folder, or restart the gateway to serve another model"
            )
        if info.decoder_start_ids != first.decoder_start_ids:
            raise IncompatiblePair(
                f"the target's answers begin with {list(info.decoder_start_ids)}, the pool was started with "
                f"{list(first.decoder_start_ids)}"
            )
        if info.context_limit < first.context_limit:
            raise IncompatiblePair(
                f"the target's context limit is {info.context_limit}, the pool was started with {first.context_limit}"
            )

    async def check_draft(self, info: pb.WorkerInfo, link: WorkerLink) -> None:
        """Raise IncompatiblePair, which names the first difference, if a draft worker does not fit the pool's targets.

        info, link: WorkerInfo of the draft worker, and the link from which its tokenizer is fetched.
        """
        if self.is_compatible(info):
            return
        difference = None
        if self.info.tokenizer_fingerprint != info.tokenizer_fingerprint:
            async with self.comparing:
                difference = await self._difference(link)
        raise IncompatiblePair(describe_incompatibility(info, self.info, difference))

    async def _difference(self, link: WorkerLink) -> str:
        try:
            theirs = await link.get_tokenizer()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return f"their tokenizers differ; the draft's is not read: {describe_failure(error)}"
        return await difference_between(self.files, theirs)

    def is_compatible(self, draft: pb.WorkerInfo) -> bool:
        """Return whether a draft worker with this WorkerInfo is compatible with the pool's targets."""
        return is_compatible(draft, self.info)


def _identity(info: pb.WorkerInfo) -> str:
    # All that must not change for a request that continues on another target or after a restart.
    exact = ""
    if info.is_batch_invariant:
        exact = ", batch-invariant"
    quantization = info.quantization or "none"
    return f"{info.model_id} in {info.dtype} (quantization {quantization}{exact}) ending at {list(info.eos_token_ids)}"
