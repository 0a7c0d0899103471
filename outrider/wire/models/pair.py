"""Say whether a draft may serve a target, and why not. For gateways, which ask workers, and `outrider doctor`."""

from __future__ import annotations

from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TABLES
from outrider.wire.models.model_id import short_name


def has_same_tokens(draft: pb.WorkerInfo, target: pb.WorkerInfo) -> bool:
    """Return whether ids mean the same to both, and their logits have as many."""
    same_size = draft.vocab_size == target.vocab_size
    return same_size and draft.tokenizer_fingerprint == target.tokenizer_fingerprint


def fits(draft: pb.WorkerInfo, target: pb.WorkerInfo) -> bool:
    """Return whether the draft's tokens mean the same there, or it may translate, and are written after the same."""
    if not has_same_tokens(draft, target) and not draft.translates:
        return False
    return draft.attention_path == TABLES or draft.decoder_start_ids == target.decoder_start_ids


def misfit(draft: pb.WorkerInfo, target: pb.WorkerInfo, difference: str | None) -> str:
    """Return why a draft that does not fit does not, and what to do.

    difference: the first between their tokenizers, as a sentence; needed where the fingerprints differ.
    """
    pair = f"draft {short_name(draft.model_id)} does not fit target {short_name(target.model_id)}"
    if target.tokenizer_fingerprint != draft.tokenizer_fingerprint:
        return (
            f"{pair}: {difference or 'their tokenizers differ'}; use two models of one tokenizer, or a draft that "
            "is a decoder-only model, which translates"
        )
    if target.vocab_size != draft.vocab_size:
        return (
            f"{pair}: logits have {target.vocab_size} entries in the target and {draft.vocab_size} in the draft; "
            "use two models of one vocabulary size, or the target's folder for a draft without a model"
        )
    start, other = list(target.decoder_start_ids), list(draft.decoder_start_ids)
    if start and other:
        return (
            f"{pair}: answers begin with {start} in the target and with {other} in the draft; use two models whose "
            "configurations name the same decoder_start_token_id"
        )
    has_one = "target" if start else "draft"
    return (
        f"{pair}: the {has_one} has an encoder and the other has none; use two encoder-decoder models or two "
        "decoder-only ones"
    )
