"""Model folders from anybody: no code in them runs, and what is wrong with a file is one line that names it, before
anything of the size that it claims is built.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gateway.tokenizer import Tokenizer
from outrider.engine import checkup
from outrider.engine.attention.fused_weights import MIN_TABLE_BYTES
from outrider.engine.files.model_files import MAX_OTHER_BYTES, model_file
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import read_eagle3
from outrider.engine.loading.loader import check_weights, load_runner, read_config
from outrider.engine.loading.vocabulary import read_vocabulary
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_json import MAX_CONTAINERS
from outrider.wire.settings.config import TargetConfig
from tests.stack import DEMO_TARGET
from tests.tiny_models import tiny_llama

DEMO_HEAD = Path(DEMO_TARGET).parent / "eagle3"
INDEX = "model.safetensors.index.json"
NESTED = "[" * 200_000
Change = Callable[[Path], object]


class Trap:
    """Leaves a file where it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_llama(tmp_path / "model", vocab_size=300))


def load(folder: Path) -> Any:
    return load_runner(
        TargetConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_tokens=256,
            max_slots=2,
            context_limit=None,
            attention_path="dense",
        )
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"weight": Trap(sprung)}, folder / name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors \(the weights; other formats are not loaded\)"):
        load(folder)
    assert not sprung.exists()


def test_pickles_beside_the_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    assert load(folder).facts.num_parameters > 0
    assert not sprung.exists()


def test_code_beside_the_weights_is_never_run(folder: Path, tmp_path: Path) -> None:
    """A configuration that names classes of its own, as transformers runs them with trust_remote_code."""
    sprung = tmp_path / "sprung"
    code = f"from pathlib import Path\nPath({str(sprung)!r}).touch()\nclass Own: pass\n"
    for name in ("own.py", "modeling_own.py", "tokenization_own.py"):
        (folder / name).write_text(code)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "modeling_own.Own", "AutoTokenizer": ["own.Own", None]}
    path.write_text(json.dumps({**config, "auto_map": classes}))
    assert load(folder).facts.num_parameters > 0, "the architecture is known: it is loaded as what transformers has"
    path.write_text(json.dumps({**config, "auto_map": classes, "model_type": "own"}))
    with pytest.raises(ConfigError):
        load(folder)
    assert not sprung.exists()
    shutil.rmtree(folder)


def refusal(read: Callable[[], object]) -> str:
    """Return what a folder is refused with, which is one line."""
    with pytest.raises(ConfigError) as caught:
        read()
    assert "\n" not in caught.value.message
    return caught.value.message


def write(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def change(name: str, **values: Any) -> Change:
    """Return what changes fields of a JSON file, which may be missing."""

    def apply(folder: Path) -> None:
        path = folder / name
        before = json.loads(path.read_bytes()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))

    return apply


def index_of(*shards: object) -> Change:
    """Return what makes the folder's weights one file for each of `shards`, by an index alone."""

    def apply(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "weights.bin")
        torch.save(tensors, folder / "weights.pt")
        safetensors.torch.save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
        safetensors.torch.save_file(tensors, folder.parent / "x.safetensors", metadata={"format": "pt"})
        weight_map = {name: shards[number % len(shards)] for number, name in enumerate(sorted(tensors))}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


@pytest.mark.parametrize(
    "shards",
    [
        ("weights.bin",),
        ("weights.pt",),
        ("a.safetensors", "weights.bin"),
        ("weights.bin", "a.safetensors"),
        ("../x.safetensors",),
        ("{parent}/x.safetensors",),
        (5,),
        (None,),
        (["a.safetensors"],),
    ],
    ids=str,
)
def test_an_index_names_safetensors_files_beside_it_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shards: tuple[Any, ...]
) -> None:
    def load_pickle(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", load_pickle)
    index_of(*(each.format(parent=folder.parent) if isinstance(each, str) else each for each in shards))(folder)
    for read in (partial(load, folder), partial(Checkpoint, str(folder))):
        assert f"{INDEX} says that" in refusal(read)


def test_an_index_of_safetensors_files_is_read(folder: Path) -> None:
    index_of("a.safetensors")(folder)
    assert check_weights(str(folder), read_config(str(folder))).config.num_hidden_layers == 2
    shutil.copyfile(folder / "a.safetensors", folder / "model.safetensors")
    assert f"has model.safetensors and an {INDEX} that does not name it" in refusal(partial(load, folder))


def test_config_json_names_no_other_weights(folder: Path) -> None:
    """transformers would take an index of another name, and pickles by it."""
    change("config.json", transformers_weights="other.safetensors.index.json")(folder)
    assert "transformers_weights" in refusal(partial(load, folder))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        INDEX,
    ],
)
def test_a_link_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "private").write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")

    def read() -> None:
        load(folder)
        tokenizer_files(str(folder))

    assert f"{folder / name} is a link that leads out of its folder" in refusal(read)


def test_a_snapshot_of_a_hubs_cache_may_link_to_its_repositorys_blobs(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--owner--name" / "snapshots" / "0123"
    blobs = cache / "models--owner--name" / "blobs"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert check_weights(str(snapshot), read_config(str(snapshot))).config.num_hidden_layers == 2
    (snapshot / "chat_template.jinja").symlink_to(folder / "config.json")
    assert "leads out" in refusal(partial(model_file, str(snapshot), "chat_template.jinja"))


def split_by(pattern: dict[str, Any]) -> Change:
    return change("tokenizer.json", pre_tokenizer=pattern)


@pytest.mark.parametrize(
    ("apply", "named"),
    [
        (write("tokenizer.json", b"\xff\xfe"), "tokenizer.json"),
        (write("tokenizer.json", NESTED), "tokenizer.json"),
        (split_by({"type": "FixedLength", "length": 0}), "tokenizer.json"),
        (
            change(
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
            change("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "tokenizer.json",
        ),
        (
            change("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}),
            "tokenizer.json",
        ),
        (
            change("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}),
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


@pytest.mark.parametrize(
    ("apply", "named"),
    [
        (write("config.json", NESTED), "config.json"),
        (write("config.json", b'{"a": "\xff"}'), "config.json"),
        (change("config.json", num_hidden_layers=0), "config.json"),
        (change("config.json", num_hidden_layers=-1), "config.json"),
        (change("config.json", num_hidden_layers=100_000), "config.json"),
        (change("config.json", num_hidden_layers=2_000), "a network of more than 4096 modules"),
        (change("config.json", num_labels=10**8), "config.json"),
        (change("config.json", text_config={"num_labels": 10**8}), "config.json"),
        (change("config.json", model_type="gpt_neo", attention_types=[[["global"], 10**9]]), "config.json"),
        (change("config.json", max_position_embeddings=2**31 - 1), "config.json"),
        (change("config.json", max_position_embeddings=2**33), "config.json"),
        (change("config.json", max_position_embeddings=2**60), "config.json"),
        (change("config.json", max_position_embeddings=10**30), "config.json"),
        (change("config.json", vocab_size=10**9), "model.embed_tokens.weight is [300, 32]"),
        (change("config.json", vocab_size=301), "model.embed_tokens.weight is [300, 32]"),
        (change("config.json", head_dim=10**9), "q_proj.weight is [32, 32]"),
        (change("config.json", mlp_bias=True, intermediate_size=10**9), "gate_proj.weight is [64, 32]"),
        (change("generation_config.json", eos_token_id=-5), "generation_config.json"),
        (change("generation_config.json", eos_token_id=2**70), "generation_config.json"),
        (change("generation_config.json", eos_token_id="a"), "generation_config.json"),
        (change("generation_config.json", eos_token_id=["a"]), "generation_config.json"),
        (write("generation_config.json", NESTED), "generation_config.json"),
        (write("generation_config.json", "{"), "generation_config.json"),
        (write(INDEX, NESTED), INDEX),
        (write(INDEX, '{"weight_map": []}'), INDEX),
        (write(INDEX, f"[{'[],' * MAX_CONTAINERS}[]]"), "lists and objects"),
        (write("generation_config.json", f"[{'[],' * 400_000}[]]"), "more than 1 MiB"),
    ],
)
def test_numbers_and_files_that_cannot_be_are_named_before_anything_is_built(
    folder: Path, apply: Change, named: str
) -> None:
    apply(folder)
    message = refusal(partial(load, folder))
    assert named in message and str(folder) in message
    doctor = partial(checkup.read_model, str(folder), checkup.Task(str(folder), [], "cpu", "float32"))
    assert refusal(doctor) == message


def test_a_draft_without_weights_reads_the_same_configuration(folder: Path) -> None:
    change("generation_config.json", eos_token_id=-5)(folder)
    tokenizer_json = (folder / "tokenizer.json").read_bytes()
    assert "eos_token_id" in refusal(partial(read_vocabulary, str(folder), tokenizer_json, None))


def test_a_head_is_no_deeper_than_its_tensors(tmp_path: Path) -> None:
    """Its network is built as often as its config.json says, on a draft's machine."""
    shutil.copytree(DEMO_HEAD, tmp_path / "head")
    change("config.json", num_hidden_layers=60_000)(tmp_path / "head")
    message = refusal(lambda: read_eagle3(Checkpoint(str(tmp_path / "head")), TargetFiles(DEMO_TARGET)))
    assert "num_hidden_layers is 60000, and there are" in message
    change("config.json", num_hidden_layers=10**6)(tmp_path / "head")
    assert "num_hidden_layers" in refusal(partial(Checkpoint, str(tmp_path / "head")))


def test_complex_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.norm.weight"] = torch.complex(tensors["model.norm.weight"], tensors["model.norm.weight"])
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    assert f"model.norm.weight in {path} is complex (C64)" in refusal(partial(load, folder))


def test_a_huge_table_is_not_made_for_a_context_that_config_json_alone_names(folder: Path) -> None:
    """A head of 8 columns: 32 bytes of tables for a position."""
    change("config.json", max_position_embeddings=MIN_TABLE_BYTES // 32 + 1)(folder)
    config = TargetConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_tokens=256, max_slots=2)
    assert load_runner(config.model_copy(update={"context_limit": 64})).path.name == "fused"
    with pytest.raises(ConfigError, match=r"MiB of rotary tables for a context of .*; set context_limit"):
        load_runner(config.model_copy(update={"attention_path": "fused"}))


def pickled_head(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"medusa_num_heads": 1}')
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def test_an_expanded_tensor_of_a_pickle_is_refused(tmp_path: Path) -> None:
    head = pickled_head(tmp_path / "head", {"0.0.linear.weight": torch.zeros(1).expand(2**36)})
    files = Checkpoint(str(head), allow_pickle=True)
    assert "0.0.linear.weight in" in refusal(lambda: files.names)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_a_quantised_tensor_of_a_pickle_is_refused(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.qint8)
    files = Checkpoint(str(pickled_head(tmp_path / "head", {"0.0.linear.weight": quantised})), allow_pickle=True)
    assert "0.0.linear.weight in it" in refusal(lambda: files.names)


def test_a_compressed_pickle_is_refused(tmp_path: Path) -> None:
    """64 KiB that unpack to 64 MiB."""
    head = pickled_head(tmp_path / "head", {"0.0.linear.weight": torch.zeros(2**20)})
    path = head / "medusa_lm_head.pt"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    files = Checkpoint(str(head), allow_pickle=True)
    assert "is compressed" in refusal(lambda: files.names)
