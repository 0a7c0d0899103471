"""Tables that a model ties or lacks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from outrider.engine.loading.loader import check_weights, read_config
from outrider.wire.errors import ConfigError
from tests.tiny_models import tiny_t5
from tests.unit.outrider.engine.files.folders import change, load

VOCAB = 300


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_t5(tmp_path_factory.mktemp("t5"), vocab_size=VOCAB)


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
