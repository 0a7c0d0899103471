"""The bytes of a tokenizer's tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models

from outrider.drafting.token_bytes import read_spelling
from outrider.wire.errors import ConfigError
from tests.other_tokenizers import json_of


def test_tokens_that_are_not_bytes_are_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="parted by spaces"):
        read_spelling(json_of(tokenizer))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="decodes with WordPiece"):
        read_spelling(json_of(tokenizer))
