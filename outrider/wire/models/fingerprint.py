"""Compare what two tokenizers mean by an id. Used by the workers (GetInfo) and by the gateway (refusing a wrong pair).

Reads `tokenizer.json` as the tokenizers library writes it. Only what decides the meaning of ids counts: vocabulary,
added tokens and which of them are special. How text is split does not, since only ids travel between models.
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
    special_ids: frozenset[int]


def tokenizer_fingerprint(tokenizer_json: bytes) -> str:
    """Return the SHA-256 hex digest of the vocabulary sorted by id, added tokens included, and the special ids.

    Raises ConfigError when the bytes are not a tokenizer.json.
    """
    vocabulary = _read(tokenizer_json)
    entries = [[i, vocabulary.tokens[i], i in vocabulary.special_ids] for i in sorted(vocabulary.tokens)]
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()


def first_difference(target_json: bytes, draft_json: bytes) -> str | None:
    """Return the lowest id at which the two disagree, as a sentence; None when they agree.

    Raises ConfigError when either is not a tokenizer.json.
    """
    target, draft = _read(target_json), _read(draft_json)
    for token_id in sorted(target.tokens.keys() | draft.tokens.keys()):
        in_target, in_draft = _describe(target, token_id), _describe(draft, token_id)
        if in_target != in_draft:
            return f"id {token_id} is {in_target} in the target and {in_draft} in the draft"
    return None


def _describe(vocabulary: _Vocabulary, token_id: int) -> str:
    if token_id not in vocabulary.tokens:
        return "missing"
    special = "the special token " if token_id in vocabulary.special_ids else ""
    return f"{special}{vocabulary.tokens[token_id]!r}"


def _read(tokenizer_json: bytes) -> _Vocabulary:
    try:
        document = json.loads(tokenizer_json)
        tokens = dict(_model_tokens(document["model"]["vocab"]))
        added = document.get("added_tokens") or []
        tokens.update((int(token["id"]), str(token["content"])) for token in added)
        special = frozenset(int(token["id"]) for token in added if token.get("special"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"tokenizer.json ({len(tokenizer_json)} bytes) is not a tokenizers file: {type(error).__name__} {error}; "
            "save it again with PreTrainedTokenizerFast.save_pretrained"
        ) from None
    return _Vocabulary(tokens, special)


def _model_tokens(vocab: Any) -> Iterator[tuple[int, str]]:
    """Yield (id, token). BPE, WordPiece and WordLevel write {token: id}; Unigram writes [[token, score], ...] by id."""
    if isinstance(vocab, dict):
        for token, token_id in vocab.items():
            yield int(token_id), str(token)
    else:
        for token_id, entry in enumerate(vocab):
            yield token_id, str(entry[0])
