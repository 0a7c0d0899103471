"""A model in one GGUF file: weights, tokens, ends and template are those of its folder; and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.engine.checkup import Task, findings
from outrider.engine.files.model_files import gguf_path
from outrider.engine.files.tokenizer_files import read_tokenizer
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.families import MODEL, family_of
from outrider.engine.loading.loader import check_weights, load_runner, read_config
from outrider.engine.model_runner import UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import tokenizer_fingerprint
from outrider.wire.models.model_id import full_name, local_path, short_name
from outrider.wire.settings.config import TargetConfig
from outrider.wire.settings.gpu_shares import num_weight_bytes
from tests.gguf_models import TEMPLATE, write_gguf
from tests.tiny_models import EOS_ID, UNKNOWN_ID, tiny_llama

IDS = list(range(40, 60))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers.integrations.gguf") is None, reason="this transformers reads no GGUF"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("whole"), vocab_size=300)


@pytest.fixture(scope="module")
def file(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_gguf(folder, tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


def settings(model: str, **changes: object) -> TargetConfig:
    return TargetConfig(model=model, device="cpu", dtype="float32", max_slots=1, **changes)


def refusal(model: str) -> str:
    with pytest.raises(ConfigError) as raised:
        check_weights(model, read_config(model))
    assert "\n" not in raised.value.message
    return raised.value.message


def test_its_logits_are_those_that_transformers_has_of_the_file(file: str, folder: str) -> None:
    runner = load_runner(settings(file))
    table = runner.pool.new_table()
    found = runner.forward([Row.of(table, IDS, 0, len(IDS))])  # [T, V]
    path = Path(file)
    own = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert torch.allclose(found, UncachedModel(own).forward(IDS), atol=1e-3)
    rounded_from = UncachedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).forward(IDS)
    assert 0 < float((found - rounded_from).abs().max()) < 0.05 * float(rounded_from.abs().max())
    assert runner.facts.eos_token_ids == (EOS_ID, UNKNOWN_ID)  # of text and of a turn
    assert runner.facts.context_limit == 256
    assert short_name(runner.facts.model_id) == "tiny.Q8_0" and runner.facts.model_id == full_name(file)


def test_its_tokenizer_is_the_folders_own(file: str, folder: str) -> None:
    found, own = read_tokenizer(file).files, read_tokenizer(folder).files
    assert tokenizer_fingerprint(found.tokenizer_json) == tokenizer_fingerprint(own.tokenizer_json)
    assert found.chat_template.decode() == TEMPLATE
    config = json.loads(found.tokenizer_config_json)
    assert config["bos_token"] == config["eos_token"] == "</s>"
    texts = ["Hello  world, 1234.", "ein Süßes ☃\n\n", "</s> aaaa"]
    both = [Tokenizer.from_buffer(files.tokenizer_json) for files in (found, own)]
    assert [both[0].encode(text).ids for text in texts] == [both[1].encode(text).ids for text in texts]


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [("gpt-2", ["Ab", "12"]), ("smollm", ["Ab", "1", "2"]), ("llama-bpe", ["</s>", "Ab", "12"])],
)
def test_a_text_is_cut_as_the_file_says(cut: str, pieces: list[str], tmp_path: Path) -> None:
    wide = tiny_llama(tmp_path / "wide", vocab_size=4000)  # digits are joined in tokens
    model = write_gguf(wide, tmp_path / "tiny.gguf", cut=cut)
    assert Tokenizer.from_buffer(read_tokenizer(model).files.tokenizer_json).encode("Ab12").tokens == pieces


def test_a_template_that_is_no_text_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the chat template of .* is 5, which is no text"):
        read_tokenizer(write_gguf(folder, tmp_path / "tiny.gguf", template=5))


def test_a_file_that_is_replaced_is_read_again(folder: str, tmp_path: Path) -> None:
    """transformers reads the header by the file's name alone."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(Path(write_gguf(folder, tmp_path / "other.gguf", architecture="hal9000")).read_bytes())
    assert "of the architecture hal9000" in refusal(str(path))
    write_gguf(folder, path)
    os.utime(path, ns=(0, 0))
    check_weights(str(path), read_config(str(path)))


def test_an_unknown_cut_is_refused(folder: str, tmp_path: Path) -> None:
    model = write_gguf(folder, tmp_path / "tiny.gguf", cut="by-moonlight")
    with pytest.raises(ConfigError, match="cuts a text by 'by-moonlight', which is not known here"):
        read_tokenizer(model)


def test_the_scaling_of_llama_3_is_read_from_its_divisors(folder: str, tmp_path: Path) -> None:
    exponents = numpy.arange(4) / 4
    turns = 8192 / (2 * numpy.pi) * 10000.0**-exponents
    kept = ((turns - 1) / 3).clip(0, 1)
    divisors = (1 / ((1 - kept) / 8 + kept)).astype(numpy.float32)
    model = write_gguf(folder, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": divisors})
    rope = read_config(model).rope_parameters
    check_weights(model, read_config(model))
    assert rope["rope_type"] == "llama3" and rope["factor"] == 8
    divisors[0] = 2
    other = write_gguf(folder, tmp_path / "other.gguf", tensors={"rope_freqs.weight": divisors})
    assert "scales rotary frequencies (rope_freqs.weight) in another way than Llama 3" in refusal(other)


def test_a_stated_scaling_of_positions_is_carried_over(folder: str, tmp_path: Path) -> None:
    values = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    rope = read_config(write_gguf(folder, tmp_path / "tiny.gguf", values=values)).rope_parameters
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    assert {name: rope[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": {"expert_count": 8}}, "states llama.expert_count = 8, which transformers"),
        ({"values": {"rope.scaling.type": "longrope"}}, "states llama.rope.scaling.type = longrope"),
        ({"tensors": {"blk.0.router.weight": numpy.zeros((2, 2), numpy.float32)}}, "a tensor blk.0.router.weight"),
        ({"architecture": "hal9000"}, "of the architecture hal9000, which transformers .* cannot read from GGUF"),
    ],
)
def test_what_transformers_would_leave_out_is_refused_by_name(
    options: dict[str, Any], message: str, folder: str, tmp_path: Path
) -> None:
    model = write_gguf(folder, tmp_path / "tiny.gguf", **options)
    assert re.search(message, refusal(model))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (struct.pack("<IIQ", 9, 0, 4 << 30), "a list has 4294967296 elements, and at most 2097152 are read"),
        (struct.pack("<IIQ", 9, 8, 1 << 31), "a list has 2147483648 elements"),
        (struct.pack("<IQ", 8, 4 << 30), "its header has more than 64 MiB"),
    ],
)
def test_a_header_of_any_size_takes_no_memory(stated: bytes, message: str, tmp_path: Path) -> None:
    """The file takes no room on a disk either: what is behind its beginning is a hole."""
    path = tmp_path / "hole.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + stated)
    os.truncate(path, 6 << 30)
    assert message in refusal(str(path))
    with pytest.raises(ConfigError, match=message):
        read_tokenizer(str(path))


def test_more_blocks_than_anything_has_are_refused_before_they_are_counted(file: str, tmp_path: Path) -> None:
    path, name = tmp_path / "tiny.gguf", b"llama.block_count" + struct.pack("<I", 4)
    data = Path(file).read_bytes()
    place = data.index(name) + len(name)
    path.write_bytes(data[:place] + struct.pack("<I", 1 << 31) + data[place + 4 :])
    assert "llama.block_count in" in refusal(str(path)) and "is 2147483648" in refusal(str(path))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "it is empty": lambda data: b"",
    "it does not begin with GGUF": lambda data: b"PK" + data,
    "is GGUF of version 9": lambda data: data[:4] + struct.pack("<I", 9) + data[8:],
    "its header goes on behind its end": lambda data: data[:400],
    "ends before .* does: it was not copied whole": lambda data: data[:-100],
    "has the type 77": lambda data: data.replace(*_as_type(b"llama.vocab_size", 4, 77)),
}


def _as_type(name: bytes, old: int, new: int) -> tuple[bytes, bytes]:
    return name + struct.pack("<I", old), name + struct.pack("<I", new)


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_file_is_refused_in_one_sentence(message: str, file: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(DAMAGE[message](Path(file).read_bytes()))
    assert re.search(message, refusal(str(path)))


def test_a_type_that_cannot_be_unpacked_is_refused(folder: str, tmp_path: Path) -> None:
    path = Path(write_gguf(folder, tmp_path / "tiny.gguf"))
    data, name = path.read_bytes(), b"token_embd.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, place) == (Type.Q8_0,)
    for type_id, called in ((int(Type.Q8_1), "Q8_1"), (999, "number 999")):
        path.write_bytes(data[:place] + struct.pack("<I", type_id) + data[place + 4 :])
        assert f"token_embd.weight in {path} is quantised as {called}, which the package gguf" in refusal(str(path))


def test_a_part_of_a_split_file_is_refused(file: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00003.gguf"
    path.write_bytes(Path(file).read_bytes())
    assert "is one of 3 parts of a model" in refusal(str(path)) and "llama-gguf-split --merge" in refusal(str(path))


def test_a_folder_of_gguf_alone_names_the_file(file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds GGUF: name the file, .*/tiny.Q8_0.gguf"):
        load_runner(settings(str(Path(file).parent)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere/x.gguf", "there is no such file; of a hub's repository say OWNER/NAME:FILE.gguf"),
        ("owner/name:../x.gguf", "what follows the colon must be a .gguf file of the hub's repository"),
        ("owner/name:x.bin", "what follows the colon must be a .gguf file"),
    ],
)
def test_a_name_that_can_be_none_is_refused(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        local_path(model)


def test_a_hub_id_may_name_a_file(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    (snapshot / "Q8").mkdir(parents=True)
    (snapshot / "Q8/tiny.gguf").write_bytes(Path(file).read_bytes())
    (tmp_path / "models--owner--name/refs").mkdir()
    (tmp_path / "models--owner--name/refs/main").write_text("c0ffee")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = "owner/name:Q8/tiny.gguf"
    assert local_path(model) is None and short_name(full_name(model)) == model
    assert gguf_path(model) == snapshot / "Q8/tiny.gguf" and read_config(model).vocab_size == 300
    assert num_weight_bytes(model) == num_weight_bytes(file)
    assert "there is no other.gguf in owner/name, or the hub was not reached" in refusal("owner/name:other.gguf")


def test_the_settings_may_refuse_to_unpack(file: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unpack_weights is false, and the weights of .*: they are held as F32, Q8_0"
    ):
        load_runner(settings(file, unpack_weights=False))


def test_weights_without_room_are_refused_before_they_are_read(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.memory.free_memory_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"take .* KiB when unpacked to float32 .*, and 1000 bytes are free on cpu"):
        load_runner(settings(file))


def test_it_is_a_draft_and_its_size_is_that_of_its_numbers(file: str) -> None:
    assert family_of(Checkpoint(file)) is MODEL
    num_parameters = sum(each.numel() for each in check_weights(file, read_config(file)).parameters())
    assert num_weight_bytes(file) == 2 * num_parameters


def test_doctor_reads_a_pair_of_files(file: str, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(Path(file).read_bytes())
    found = dict(findings(Task(file, [str(draft)], "cpu", "auto")))
    assert found["target"][0] == "ok" and "context 256, vocabulary 300" in found["target"][1]
    assert "the target's tokens" in found[f"draft {draft}"][1]
