"""A checkpoint is served as its files state it, its context, ends, tokens and tables, or refused by name."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from gateway.tokenizer import Tokenizer
from outrider.engine.architectures.context import context_limit_of
from outrider.engine.checkup import Task, read_model
from outrider.engine.files import tokenizer_files as tokenizer_files_module
from outrider.engine.files.ends import read_ends
from outrider.engine.files.model_files import check_folder
from outrider.engine.files.tokenizer_files import read_tokenizer, tokenizer_files, tokenizers_read_once
from outrider.engine.loading import loaded
from outrider.engine.loading.loader import check_weights, load_runner, read_config
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.rounds import some_ids
from tests.tiny_models import random_model, save, tiny_llama, tiny_t5

TOLERANCE = 1e-4
VOCAB = 300


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_t5(tmp_path_factory.mktemp("t5"), vocab_size=VOCAB)


@pytest.fixture
def folder(llama: str, tmp_path: Path) -> Path:
    """A copy of the Llama that a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None takes one out."""
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def load(folder: Path | str, **settings: Any) -> ModelRunner:
    options: dict[str, Any] = {"kv_cache_tokens": 1024, "max_slots": 2, "attention_path": "paged", **settings}
    return load_runner(TargetConfig(model=str(folder), device="cpu", dtype="auto", **options))


# Context


def scaled(kind: str, factor: float | None = 4.0, length: int = 64, **more: Any) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, **more}
    return LlamaConfig(max_position_embeddings=length, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (scaled("linear"), 256),
        (scaled("yarn"), 256),
        (scaled("yarn", original_max_position_embeddings=64), 256),  # Qwen's, where somebody adds it
        (scaled("yarn", original_max_position_embeddings=16), 64),  # DeepSeek's: stretched already
        (scaled("yarn", original_max_position_embeddings=48), 192),  # Qwen 3's, with room for an answer in the stated
        (scaled("yarn", original_max_position_embeddings=256), 64),  # cut by hand
        (scaled("yarn", factor=None, original_max_position_embeddings=16), 64),
        (scaled("dynamic"), 64),
        (scaled("llama3", original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0), 64),
        (scaled("linear", factor=float("inf")), 64),
        (scaled("linear", factor=1e308), 64),
        (scaled("yarn", original_max_position_embeddings=10**400), 64),
        (Gemma3TextConfig(rope_scaling={"rope_type": "linear", "factor": 8.0}), 131072),  # of its full layers alone
    ],
)
def test_a_scaled_context_is_the_one_that_the_file_means(config: PreTrainedConfig, limit: int) -> None:
    assert context_limit_of(config, None) == limit
    with pytest.raises(ConfigError, match=f"context_limit is {limit + 1}, the model was made for {limit}"):
        context_limit_of(config, limit + 1)


def test_dynamic_scaling_is_refused_past_its_length_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\(max_position_embeddings 64, rope scaling dynamic by 4\): past that"):
        context_limit_of(scaled("dynamic"), 65)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_stretched_context_computes_what_transformers_does_without_a_cache(kind: str, tmp_path: Path) -> None:
    config = scaled(kind)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config.update({**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0})
    network = random_model(config, seed=3)
    runner = load(save(network, tmp_path))
    assert runner.facts.context_limit == 256
    ids = some_ids(200, VOCAB, 1)
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0]
    table = runner.pool.new_table()
    runner.forward([Row.of(table, ids[:90], 0, 1)])  # past the stated length from its cache
    found = runner.forward([Row.of(table, ids, 90, 110), Row.of(runner.pool.new_table(), ids[:20], 0, 1)])
    assert (found[:110] - expected[90:]).abs().max() < TOLERANCE
    assert (found[110] - expected[19]).abs().max() < TOLERANCE


# Ends


def test_every_end_that_a_file_states_ends_an_answer(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=4)
    change(folder / "generation_config.json", eos_token_id=[4, 5])
    ends = read_ends(str(folder), read_config(str(folder)))
    assert ends.ids == (4, 5, 0)
    assert ends.difference is not None and "tokenizer_config.json </s> (0)" in ends.difference
    assert load(folder).facts.eos_token_ids == (4, 5, 0)
    notes = read_model(str(folder), Task(str(folder), [], "cpu", "auto")).notes
    assert notes == (ends.difference,), "doctor says so, too"


def test_minus_one_is_no_end(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=-1)
    change(folder / "generation_config.json", eos_token_id=[-1, 5])
    assert load(folder).facts.eos_token_ids == (5, 0)


def test_files_that_agree_on_the_ends_are_no_news(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[0, 7])
    ends = read_ends(str(folder), read_config(str(folder)))
    assert (ends.ids, ends.difference) == ((0, 7), None)


def test_an_end_that_a_class_has_unstated_ends_nothing_where_a_file_states_another(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=None)  # LlamaConfig's is 2
    (folder / "generation_config.json").unlink()
    assert read_ends(str(folder), read_config(str(folder))).ids == (0,)
    change(folder / "tokenizer_config.json", eos_token=None)
    assert read_ends(str(folder), read_config(str(folder))).ids == (2,)


# Tokens

TOOL = {"content": "<|tool|>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
THINK = {**TOOL, "content": "</think>", "rstrip": False}
TEXT = "a<|tool|> b</think>\n[x]</s>"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"added_tokens_decoder": {"301": {**THINK}, "300": {**TOOL, "special": True}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"0": {**TOOL, "content": "</s>", "special": False}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"68": {**THINK, "content": "b", "special": True}}}},
        {"added_tokens.json": {"</think>": 301, "<|tool|>": 300}},
        {
            "tokenizer_config.json": {"bos_token": None, "eos_token": None},
            "special_tokens_map.json": {
                "bos_token": "[x]",
                "eos_token": {"content": "</s>"},
                "additional_special_tokens": ["<|tool|>", "</think>"],
            },
            "added_tokens.json": {"[x]": 300},
        },
        {"tokenizer_config.json": {"extra_special_tokens": {"tool_token": "<|tool|>"}, "pad_token": "[x]"}},
        {"tokenizer_config.json": {"extra_special_tokens": ["</think>", "b"]}},
    ],
)
def test_tokens_that_tokenizer_json_does_not_list_are_those_of_transformers(
    folder: Path, files: dict[str, dict[str, Any]]
) -> None:
    for name, fields in files.items():
        change(folder / name, **fields)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_files(tokenizer_files(str(folder)))
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT)
    for skips in (True, False):
        assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert ours.special_tokens == theirs.special_tokens_map
    for token_id in range(len(theirs)):
        assert ours.token_name(token_id) == theirs.convert_ids_to_tokens(token_id)


def test_a_tokenizer_that_lists_all_is_handed_on_as_it_is(folder: Path) -> None:
    added = {"added_tokens_decoder": {"0": {"content": "</s>", "special": True, "normalized": False}}}
    change(folder / "tokenizer_config.json", **added)
    files = tokenizer_files(str(folder))
    assert files.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert files.tokenizer_config_json == (folder / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"310": TOOL}}, r"'<\|tool\|>' as 310, .* would be 300"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": TOOL}}, r"'<\|tool\|>' as 5, .* would be 300"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": TOOL}}, r"added_tokens_decoder\['x'\] is"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": "<x>"}}, r"added_tokens_decoder\['300'\] is '<x>'"),
        ("tokenizer_config.json", {"added_tokens_decoder": [TOOL]}, r"added_tokens_decoder is \["),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: TOOL}}, r"added_tokens_decoder\['999"),
        ("tokenizer_config.json", {"image_token": "\ud800"}, r"list '\\ud800', which is no text in UTF-8"),
        ("added_tokens.json", {"<x>": "300"}, r"added_tokens.json .* '<x>' is '300'"),
    ],
)
def test_a_token_that_cannot_be_what_it_is_listed_as_is_refused_by_name(
    folder: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    change(folder / name, **fields)
    with pytest.raises(ConfigError, match=message):
        tokenizer_files(str(folder))


def test_tokens_beyond_the_rows_are_named_by_doctor(folder: Path) -> None:
    change(folder / "tokenizer_config.json", additional_special_tokens=["<more>"])
    notes = read_model(str(folder), Task(str(folder), [], "cpu", "auto")).notes
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


# Tables


def without(*names: str) -> Callable[[Path], None]:
    """Take tensors out of the weights of a folder."""

    def take_out(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name in names:
            del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return take_out


def put(folder: Path, **tensors: torch.Tensor) -> None:
    found = load_file(folder / "model.safetensors")
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**found, **named}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_llama_that_lacks_a_tensor_is_refused_by_its_name(folder: Path, name: str) -> None:
    without(name)(folder)
    with pytest.raises(ConfigError, match=f"lack 1 tensors of LlamaForCausalLM, first {name}"):
        load(folder)


def test_an_encoder_decoder_model_without_one_of_its_tables_is_refused_by_its_name(t5: str, tmp_path: Path) -> None:
    """transformers takes T5's tables for one whatever config.json says, and reports none of them as missing."""
    folder = Path(shutil.copytree(t5, tmp_path / "t5"))
    change(folder / "config.json", tie_word_embeddings=False)
    for load_or_doctor in (load, lambda folder: check_weights(str(folder), read_config(str(folder)))):
        with pytest.raises(ConfigError, match=r"lack lm_head\.weight"):
            load_or_doctor(folder)
    head = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1))
    put(folder, lm_head__weight=head)
    runner = load(folder, attention_path="auto")
    network = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert torch.equal(network.lm_head.weight, head) and not torch.equal(network.shared.weight, head)
    assert runner.facts.num_parameters == sum(each.numel() for each in network.parameters())
    without("shared.weight")(folder)
    with pytest.raises(ConfigError, match=r"lack shared\.weight"):
        load(folder)
    put(folder, decoder__embed_tokens__weight=network.shared.weight.clone())
    check_weights(str(folder), read_config(str(folder)))


def test_two_tables_of_a_tied_model_are_refused_unless_they_are_one(folder: Path) -> None:
    change(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight and model\.embed_tokens\.weight with other values"):
        load(folder)
    put(folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    load(folder)


# Files


def test_an_adapter_is_refused_alone_and_beside_weights(folder: Path) -> None:
    change(folder / "adapter_config.json", base_model_name_or_path="some/base")
    with pytest.raises(ConfigError, match=r"has an adapter \(adapter_config.json, base model 'some/base'\)"):
        load(folder)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="merge it into its base"):
        load(folder)


def test_an_index_of_missing_shards_beside_whole_weights_may_be_deleted(folder: Path) -> None:
    change(folder / "model.safetensors.index.json", weight_map={"lm_head.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(ConfigError, match=r"has no model-00001.*where model\.safetensors has all weights, delete"):
        load(folder)


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
