"""The pairing check: whether a draft is compatible with a target, and why not. The gateway and `outrider doctor` call
it with the `WorkerInfo` of both workers.
"""

from __future__ import annotations

from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TABLES
from outrider.wire.models.model_id import short_name


def has_same_tokens(draft: pb.WorkerInfo, target: pb.WorkerInfo) -> bool:
    """Return whether draft worker and target have the same tokenizer, and logits for the same number of token ids."""
    if draft.vocab_size != target.vocab_size:
        return False
    return draft.tokenizer_fingerprint == target.tokenizer_fingerprint


def is_compatible(draft: pb.WorkerInfo, target: pb.WorkerInfo) -> bool:
    """Return whether a draft worker can draft for a target.

    Two conditions must hold. First, both have the same tokens, or the draft worker retokenizes. Second, the outputs of
    both models begin with the same ids (decoder_start_token_id); a draft worker without a model always meets this one.
    """
    if not has_same_tokens(draft, target) and not draft.supports_retokenization:
        return False
    return draft.attention_path == TABLES or draft.decoder_start_ids == target.decoder_start_ids


def describe_incompatibility(draft: pb.WorkerInfo, target: pb.WorkerInfo, difference: str | None) -> str:
    """Return a sentence that says why a draft worker is not compatible with a target, and what to do. Call it only if
    `is_compatible` is false.

    difference: result of `fingerprint.first_difference` for their tokenizers, which the sentence quotes if the
    tokenizers differ. None = it is unknown.
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
    target_start = list(target.decoder_start_ids)
    draft_start = list(draft.decoder_start_ids)
    if target_start and draft_start:
        return (
            f"{pair}: answers begin with {target_start} in the target and with {draft_start} in the draft; use two "
            "models whose configurations name the same decoder_start_token_id"
        )
    with_encoder = "target" if target_start else "draft"
    return (
        f"{pair}: the {with_encoder} has an encoder and the other has none; use two encoder-decoder models or two "
        "decoder-only ones"
    )
