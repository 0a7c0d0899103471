"""The tokenizer in a GGUF file."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.engine.files.tokenizer_files import read_tokenizer
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import tokenizer_fingerprint
from tests.gguf_models import TEMPLATE, write_gguf
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers.integrations.gguf") is None, reason="this transformers reads no GGUF"
)


def test_its_tokenizer_is_the_folders_own(file: str, plain: str) -> None:
    found, own = read_tokenizer(file).files, read_tokenizer(plain).files
    assert tokenizer_fingerprint(found.tokenizer_json) == tokenizer_fingerprint(own.tokenizer_json)
    assert found.chat_template.decode() == TEMPLATE
    config = json.loads(found.tokenizer_config_json)
    assert config["bos_token"] == config["eos_token"] == "</s>"
    texts = ["Hello  world, 1234.", "ein Süßes ☃\n\n", "</s> aaaa"]
    both = [Tokenizer.from_buffer(files.tokenizer_json) for files in (found, own)]
    assert [both[0].encode(text).ids for text in texts] == [both[1].encode(text).ids for text in texts]


@pytest.mark.parametrize(
    ("cut", "pieces"), [("gpt-2", ["Ab", "12"]), ("smollm", ["Ab", "1", "2"]), ("llama-bpe", ["</s>", "Ab", "12"])]
)
def test_a_text_is_cut_as_the_file_defines(cut: str, pieces: list[str], tmp_path: Path) -> None:
    wide = tiny_llama(tmp_path / "wide", vocab_size=4000)  # digits are joined in tokens
    model = write_gguf(wide, tmp_path / "tiny.gguf", cut=cut)
    assert Tokenizer.from_buffer(read_tokenizer(model).files.tokenizer_json).encode("Ab12").tokens == pieces


def test_a_template_that_is_no_text_is_refused(plain: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the chat template of .* is 5, which is no text"):
        read_tokenizer(write_gguf(plain, tmp_path / "tiny.gguf", template=5))


def test_an_unknown_cut_is_refused(plain: str, tmp_path: Path) -> None:
    model = write_gguf(plain, tmp_path / "tiny.gguf", cut="by-moonlight")
    with pytest.raises(ConfigError, match="cuts a text by 'by-moonlight', which is not known here"):
        read_tokenizer(model)
