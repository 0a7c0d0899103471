"""What a worker must be to serve a model, and which difference is named when it is not."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.links import WorkerLink
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import IncompatiblePair
from outrider.wire.fingerprint import first_difference


@dataclass(frozen=True, slots=True)
class Reference:
    """The first target of a pool: what every other worker of the model must fit."""

    info: pb.WorkerInfo
    files: pb.TokenizerFiles

    def check_target(self, info: pb.WorkerInfo) -> None:
        """Raises IncompatiblePair."""
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
        if info.context_limit < first.context_limit:
            raise IncompatiblePair(
                f"the target's context limit is {info.context_limit}, the pool was started with {first.context_limit}"
            )

    async def check_draft(self, info: pb.WorkerInfo, link: WorkerLink) -> None:
        """Raises IncompatiblePair naming the first difference."""
        if self.fits(info):
            return
        target = self.info
        pair = f"draft {info.model_id} does not fit target {target.model_id}"
        if target.tokenizer_fingerprint != info.tokenizer_fingerprint:
            files = await link.get_tokenizer()
            difference = first_difference(self.files.tokenizer_json, files.tokenizer_json)
            raise IncompatiblePair(
                f"{pair}: {difference or 'their tokenizers differ'}; use two models of one tokenizer"
            )
        raise IncompatiblePair(
            f"{pair}: logits have {target.vocab_size} entries in the target and {info.vocab_size} in the draft; "
            "use two models of one vocabulary size, or the target's folder for a draft without a model"
        )

    def fits(self, draft: pb.WorkerInfo) -> bool:
        """Whether the draft's tokens mean the same here."""
        same_size = draft.vocab_size == self.info.vocab_size
        return same_size and draft.tokenizer_fingerprint == self.info.tokenizer_fingerprint


def _identity(info: pb.WorkerInfo) -> str:
    """What must not change under a request that goes on elsewhere or after a restart."""
    exact = ", batch-invariant" if info.batch_invariant else ""
    quantization = info.quantization or "none"
    return f"{info.model_id} in {info.dtype} (quantization {quantization}{exact}) ending at {list(info.eos_token_ids)}"
