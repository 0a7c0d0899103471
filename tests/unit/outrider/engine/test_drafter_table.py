"""Drafters from a worker's settings, and what is said of texts that cannot be used."""

from pathlib import Path

import pytest

from outrider.engine.drafter_table import make_drafters
from outrider.wire.errors import ConfigError
from outrider.wire.requests.drafters import Drafter
from tests.tiny_models import write_tokenizer
from tests.unit.outrider.drafting.drafting import said

OWN = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.UNIGRAM, Drafter.BIGRAM)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 8)
    return (folder / "tokenizer.json").read_bytes()


def test_each_is_made_and_the_text_is_counted_in_tokens(tmp_path: Path, tokenizer: bytes) -> None:
    text = tmp_path / "text.txt"
    text.write_text("t2 t3 t2 t4\n")
    made = make_drafters(OWN, str(text), tokenizer, 8)
    assert tuple(made) == OWN
    assert said(made[Drafter.UNIGRAM].open([5], 1)) == {2: 2, 3: 1, 4: 1}
    assert said(made[Drafter.BIGRAM].open([2], 1)) == {3: 1, 4: 1}
    assert said(made[Drafter.NGRAM].open([5, 6, 5], 3)) == {6: 1}
    assert said(made[Drafter.LOOKUP].open([5, 6, 7, 5, 6], 5)) == {7: 1}


@pytest.mark.parametrize(
    ("content", "vocab_size", "why"),
    [
        (None, 8, "cannot be read"),
        (b"\xff\xfe", 8, "cannot be read"),
        (b"", 8, "no token"),
        (b"t2 t7", 7, "token 7 is outside the model's 7"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(
    tmp_path: Path, tokenizer: bytes, content: bytes | None, vocab_size: int, why: str
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match="drafter_text is .*text.txt.*" + why) as error:
        make_drafters((Drafter.BIGRAM,), str(text), tokenizer, vocab_size)
    assert error.value.param == "drafter_text"
