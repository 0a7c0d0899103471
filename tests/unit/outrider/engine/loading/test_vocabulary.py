"""What a draft without a model reads of the model that it drafts for: the same as a worker that loads it says."""

import json
import shutil
from pathlib import Path

import pytest

from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.loading.vocabulary import UNLIMITED_CONTEXT, Vocabulary, read_vocabulary
from outrider.wire.errors import ConfigError
from tests.stack import DEMO_TARGET


def copied(folder: Path, *names: str) -> str:
    for name in names:
        shutil.copy(Path(DEMO_TARGET, name), folder / name)
    return str(folder)


def read(model: str, context_limit: int | None = None) -> Vocabulary:
    return read_vocabulary(model, tokenizer_files(model).tokenizer_json, context_limit)


def test_no_weights_are_needed(tmp_path: Path) -> None:
    config = json.loads(Path(DEMO_TARGET, "config.json").read_text())
    folder = copied(tmp_path, "config.json", "generation_config.json", "tokenizer.json")
    whole = read(DEMO_TARGET)
    assert read(folder) == whole
    assert (whole.size, whole.context_limit) == (config["vocab_size"], config["max_position_embeddings"])
    assert whole.eos_token_ids and all(0 <= token_id < whole.size for token_id in whole.eos_token_ids)
    (tmp_path / "generation_config.json").unlink()
    assert read(folder).eos_token_ids == (config["eos_token_id"],)


def test_a_model_may_have_more_entries_than_its_tokenizer(tmp_path: Path) -> None:
    folder = copied(tmp_path, "config.json", "tokenizer.json")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))
    assert read(folder).size == config["vocab_size"] + 64


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    folder = copied(tmp_path, "tokenizer.json")
    found = read(folder)
    assert found.size == read(DEMO_TARGET).size
    assert (found.context_limit, found.eos_token_ids) == (UNLIMITED_CONTEXT, ())
    assert read(folder, 300).context_limit == 300


def test_a_limit_that_the_model_was_not_made_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_limit is 999999, the model was made for"):
        read(DEMO_TARGET, 999_999)
