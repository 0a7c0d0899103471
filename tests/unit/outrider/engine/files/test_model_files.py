"""Which files of a folder from anybody are the model's; no code in them runs."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from outrider.engine.files.model_files import model_file
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.loading.loader import check_weights, read_config
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.files.folders import change, load, load_dense, refusal


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


INDEX = "model.safetensors.index.json"


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
    assert load_dense(folder).facts.num_parameters > 0, (
        "the architecture is known: it is loaded as what transformers has"
    )
    path.write_text(json.dumps({**config, "auto_map": classes, "model_type": "own"}))
    with pytest.raises(ConfigError):
        load_dense(folder)
    assert not sprung.exists()
    shutil.rmtree(folder)


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
        load_dense(folder)
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
