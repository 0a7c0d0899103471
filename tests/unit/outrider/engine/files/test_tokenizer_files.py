"""The tokenizer that a folder's files mean, in whatever form."""

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gateway.tokenizer import Tokenizer
from outrider.engine.files import tokenizer_files as tokenizer_files_module
from outrider.engine.files.ends import read_ends
from outrider.engine.files.model_files import MAX_OTHER_BYTES, check_folder
from outrider.engine.files.tokenizer_files import read_tokenizer, tokenizer_files, tokenizers_read_once
from outrider.engine.loading import loaded
from outrider.engine.loading.loader import read_config
from outrider.engine.model_check import CheckTask, read_model
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.unit.outrider.engine.files.folders import TEXT, Change, change, refusal, with_fields, write


def test_a_tokenizer_that_lists_all_is_handed_on_as_it_is(folder: Path) -> None:
    added = {"added_tokens_decoder": {"0": {"content": "</s>", "special": True, "normalized": False}}}
    change(folder / "tokenizer_config.json", **added)
    files = tokenizer_files(str(folder))
    assert files.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert files.tokenizer_config_json == (folder / "tokenizer_config.json").read_bytes()


def test_tokens_beyond_the_rows_are_named_by_doctor(folder: Path) -> None:
    change(folder / "tokenizer_config.json", additional_special_tokens=["<more>"])
    notes = read_model(str(folder), CheckTask(str(folder), [], "cpu", "auto")).notes
    assert len(notes) == 1 and "beyond the model's 300 rows: '<more>' (300)" in notes[0]


def test_another_form_of_a_tokenizer_is_converted(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    merges = [" ".join(pair) for pair in data["model"]["merges"]]
    (folder / "tokenizer.json").unlink()
    change(folder / "vocab.json", **data["model"]["vocab"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    change(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    check_folder(folder)
    ours, theirs = Tokenizer.from_files(tokenizer_files(str(folder))), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(TEXT, False) == theirs.encode(TEXT, add_special_tokens=False)
    outside = (folder / "merges.txt").rename(folder.parent / "merges.txt")
    (folder / "merges.txt").symlink_to(outside)
    with pytest.raises(ConfigError, match=r"merges\.txt is a link that leads out of its folder"):
        tokenizer_files(str(folder))
    outside.rename(folder / "merges.txt")
    change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")  # which looks for another file
    with pytest.raises(ConfigError, match=r"it writes 'hello' as ''"):
        tokenizer_files(str(folder))
    change(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (folder / "vocab.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"has vocab\.json and no tokenizer\.json, and transformers cannot convert"):
        tokenizer_files(str(folder))


def test_a_tekken_file_of_published_size_is_converted(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    tokens = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))]
    config = {"pattern": r"\p{L}+|\s+", "default_vocab_size": 259, "default_num_special_tokens": 3}
    change(folder / "config.json", model_type="mistral")
    change(folder / "tekken.json", config=config, vocab=tokens, special_tokens=special, more="x" * (19 << 20))
    assert read_tokenizer(str(folder)).tokenizer.encode("ab</s>").ids == [3 + ord("a"), 3 + ord("b"), 2]


def test_a_tokenizer_is_read_once_in_a_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder / "config.json", eos_token_id=4)  # so that ends are named by their texts
    read = []
    parse = tokenizer_files_module.load_tokenizer
    monkeypatch.setattr(tokenizer_files_module, "load_tokenizer", lambda *args: read.append(args) or parse(*args))
    with tokenizers_read_once():
        loaded.load(TargetConfig(model=str(folder), device="cpu", kv_cache_tokens=256, max_slots=1), 1)
    assert len(read) == 1
    assert read_tokenizer(str(folder)) is not read_tokenizer(str(folder)), "outside, files may change"


def test_a_sentencepiece_file_alone_is_served(folder: Path) -> None:
    spm = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="sentencepiece is not installed")
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    pieces += [(text, 1) for text in ("\u2581", "a", "b", "\u2581a", "ab", "\u2581ab")]
    proto = spm.ModelProto()
    for rank, (text, kind) in enumerate(pieces):
        proto.pieces.add(piece=text, type=kind, score=-float(rank))
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = 0, 1, 2
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", eos_token="</s>", bos_token="<s>")
    ours, theirs = Tokenizer.from_files(tokenizer_files(str(folder))), AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    assert ours.encode("ab aab é") == theirs.encode("ab aab é") and ours.decode(ours.encode("ab é")) == "ab é"
    assert read_ends(str(folder), read_config(str(folder))).ids == (0, 2)


NESTED = "[" * 200_000


def split_by(pattern: dict[str, Any]) -> Change:
    return with_fields("tokenizer.json", pre_tokenizer=pattern)


@pytest.mark.parametrize(
    ("apply", "named"),
    [
        (write("tokenizer.json", b"\xff\xfe"), "tokenizer.json"),
        (write("tokenizer.json", NESTED), "tokenizer.json"),
        (split_by({"type": "FixedLength", "length": 0}), "tokenizer.json"),
        (
            with_fields(
                "tokenizer.json",
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                },
            ),
            "tokenizer.json",
        ),
        (
            with_fields("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "tokenizer.json",
        ),
        (
            with_fields("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}),
            "tokenizer.json",
        ),
        (
            with_fields("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}),
            "a token of id 4294967295",
        ),
        (write("tokenizer_config.json", b" " * (MAX_OTHER_BYTES + 1)), "tokenizer_config.json has more than 8 MiB"),
        (write("tokenizer_config.json", NESTED), "tokenizer_config.json"),
        (write("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named_at_load(folder: Path, apply: Change, named: str) -> None:
    apply(folder)
    assert named in refusal(partial(tokenizer_files, str(folder)))


@pytest.mark.parametrize("length", [0, 1])
def test_a_gateway_trusts_no_target_with_its_tokenizer(folder: Path, length: int) -> None:
    """The library panics, which is no Exception."""
    split_by({"type": "FixedLength", "length": length})(folder)
    read = partial(Tokenizer.from_files, pb.TokenizerFiles(tokenizer_json=(folder / "tokenizer.json").read_bytes()))
    if length:
        assert read().encode("a")
    else:
        assert "tokenizer.json cannot be used: chunk size must be non-zero" in refusal(read)
    assert "no text in UTF-8" in refusal(partial(Tokenizer.from_files, pb.TokenizerFiles(tokenizer_json=b"\xff")))
