"""The check whether two tokenizers give each token id the same meaning. Workers report a fingerprint of their tokenizer
(GetInfo), and gateways compare the fingerprints.

It reads `tokenizer.json` in the format of the tokenizers library. Only what gives ids their meaning counts: the
vocabulary, the added tokens, and which ids are special. How text is split into tokens does not count, because only ids
travel between models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: dict[int, str]
    """Token text by id."""
    special_ids: frozenset[int]


def tokenizer_fingerprint(tokenizer_json: bytes) -> str:
    """Return the fingerprint of a tokenizer: a SHA-256 hex digest of its token ids in ascending order, each with the
    token's text and with whether it is a special token. Added tokens are included. Two tokenizers with the same
    fingerprint have the same tokens.

    tokenizer_json: content of the file tokenizer.json. Raises ConfigError if the content is not that of a
    tokenizer.json.
    """
    vocabulary = _read(tokenizer_json)
    entries = list[list[object]]()  # [id, token, whether it is special]
    for token_id, token in sorted(vocabulary.tokens.items()):
        entries.append([token_id, token, token_id in vocabulary.special_ids])
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()


def first_difference(target_json: bytes, draft_json: bytes) -> str | None:
    """Return a sentence on the lowest token id at which two tokenizers differ: in the token's text, or in whether the
    token is special. None = they differ at no id.

    target_json, draft_json: contents of the target's and the draft's tokenizer.json. Raises ConfigError if either is
    not the content of a tokenizer.json.
    """
    target = _read(target_json)
    draft = _read(draft_json)
    for token_id in sorted(target.tokens.keys() | draft.tokens.keys()):
        in_target = _describe(target, token_id)
        in_draft = _describe(draft, token_id)
        if in_target != in_draft:
            return f"id {token_id} is {in_target} in the target and {in_draft} in the draft"
    return None


def _describe(vocabulary: _Vocabulary, token_id: int) -> str:
    if token_id not in vocabulary.tokens:
        return "missing"
    token = repr(vocabulary.tokens[token_id])
    if token_id in vocabulary.special_ids:
        return f"the special token {token}"
    return token


def _read(tokenizer_json: bytes) -> _Vocabulary:
    try:
        document = json.loads(tokenizer_json)
        tokens = dict(_model_tokens(document["model"]["vocab"]))
        added = document.get("added_tokens") or []
        special = set[int]()
        for token in added:
            token_id = int(token["id"])
            tokens[token_id] = str(token["content"])
            if token.get("special"):
                special.add(token_id)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"tokenizer.json ({len(tokenizer_json)} bytes) is not a tokenizers file: {type(error).__name__} {error}; "
            "save it again with PreTrainedTokenizerFast.save_pretrained"
        ) from None
    return _Vocabulary(tokens, frozenset(special))


def _model_tokens(vocab: Any) -> Iterator[tuple[int, str]]:
    # Yields (id, token). BPE, WordPiece and WordLevel write {token: id}; Unigram writes [[token, score], ...] by id.
    if isinstance(vocab, dict):
        for token, token_id in vocab.items():
            yield int(token_id), str(token)
    else:
        for token_id, entry in enumerate(vocab):
            yield token_id, str(entry[0])
