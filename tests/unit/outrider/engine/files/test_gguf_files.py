"""A model in one GGUF file: weights, tokens, ends and template are those of its folder; and what is refused."""

import importlib.util
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from outrider.engine.checkup import findings
from outrider.engine.files.model_files import gguf_path
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.kinds import MODEL, kind_of
from outrider.engine.loading.loader import check_weights, load_runner, read_config
from outrider.engine.model_check import CheckTask
from outrider.engine.model_runner import UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import full_name, local_path, short_name
from outrider.wire.settings.config import TargetConfig
from outrider.wire.settings.gpu_shares import num_weight_bytes
from tests.gguf_models import write_gguf
from tests.tiny_models import EOS_ID, UNKNOWN_ID
from tests.unit.outrider.engine.files.gguf_refusals import refusal

IDS = list(range(40, 60))
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers.integrations.gguf") is None, reason="this transformers reads no GGUF"
)


def settings(model: str, **changes: object) -> TargetConfig:
    return TargetConfig(model=model, device="cpu", dtype="float32", max_slots=1, **changes)


def test_its_logits_are_those_that_transformers_has_of_the_file(file: str, plain: str) -> None:
    runner = load_runner(settings(file))
    table = runner.pool.new_table()
    found = runner.forward([Row.of(table, IDS, 0, len(IDS))])  # [T, V]
    path = Path(file)
    own = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert torch.allclose(found, UncachedModel(own).forward(IDS), atol=1e-3)
    rounded_from = UncachedModel(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)).forward(IDS)
    assert 0 < float((found - rounded_from).abs().max()) < 0.05 * float(rounded_from.abs().max())
    assert runner.facts.eos_token_ids == (EOS_ID, UNKNOWN_ID)  # of text and of a turn
    assert runner.facts.context_limit == 256
    assert short_name(runner.facts.model_id) == "tiny.Q8_0" and runner.facts.model_id == full_name(file)


def test_a_file_that_is_replaced_is_read_again(plain: str, tmp_path: Path) -> None:
    """transformers reads the header by the file's name alone."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(Path(write_gguf(plain, tmp_path / "other.gguf", architecture="hal9000")).read_bytes())
    assert "of the architecture hal9000" in refusal(str(path))
    write_gguf(plain, path)
    os.utime(path, ns=(0, 0))
    check_weights(str(path), read_config(str(path)))


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


def test_a_type_that_cannot_be_unpacked_is_refused(plain: str, tmp_path: Path) -> None:
    path = Path(write_gguf(plain, tmp_path / "tiny.gguf"))
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


def test_weights_larger_than_memory_are_refused_before_they_are_read(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.memory.free_memory_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"take .* KiB when unpacked to float32 .*, and 1000 bytes are free on cpu"):
        load_runner(settings(file))


def test_it_is_a_draft_and_its_size_is_that_of_its_numbers(file: str) -> None:
    assert kind_of(Checkpoint(file)) is MODEL
    num_parameters = sum(each.numel() for each in check_weights(file, read_config(file)).parameters())
    assert num_weight_bytes(file) == 2 * num_parameters


def test_doctor_reads_a_pair_of_files(file: str, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(Path(file).read_bytes())
    found = dict(findings(CheckTask(file, [str(draft)], "cpu", "auto")))
    assert found["target"][0] == "ok" and "context 256, vocabulary 300" in found["target"][1]
    assert "the target's tokens" in found[f"draft {draft}"][1]
