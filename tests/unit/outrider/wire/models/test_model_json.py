"""A configuration from anybody: what cannot be is named before anything is built."""

from functools import partial
from pathlib import Path

import pytest

from outrider.engine import checkup
from outrider.engine.loading.vocabulary import read_vocabulary
from outrider.wire.models.model_json import MAX_CONTAINERS
from tests.unit.outrider.engine.files.folders import Change, load_dense, refusal, with_fields, write

INDEX = "model.safetensors.index.json"
NESTED = "[" * 200_000


@pytest.mark.parametrize(
    ("apply", "named"),
    [
        (write("config.json", NESTED), "config.json"),
        (write("config.json", b'{"a": "\xff"}'), "config.json"),
        (with_fields("config.json", num_hidden_layers=0), "config.json"),
        (with_fields("config.json", num_hidden_layers=100_000), "config.json"),
        (with_fields("config.json", num_hidden_layers=2_000), "a network of more than 4096 modules"),
        (with_fields("config.json", num_labels=10**8), "config.json"),
        (with_fields("config.json", text_config={"num_labels": 10**8}), "config.json"),
        (with_fields("config.json", model_type="gpt_neo", attention_types=[[["global"], 10**9]]), "config.json"),
        (with_fields("config.json", max_position_embeddings=2**31 - 1), "config.json"),
        (with_fields("config.json", max_position_embeddings=10**30), "config.json"),
        (with_fields("config.json", vocab_size=10**9), "model.embed_tokens.weight is [300, 32]"),
        (with_fields("config.json", vocab_size=301), "model.embed_tokens.weight is [300, 32]"),
        (with_fields("config.json", head_dim=10**9), "q_proj.weight is [32, 32]"),
        (with_fields("config.json", mlp_bias=True, intermediate_size=10**9), "gate_proj.weight is [64, 32]"),
        (with_fields("generation_config.json", eos_token_id=-5), "generation_config.json"),
        (with_fields("generation_config.json", eos_token_id=["a"]), "generation_config.json"),
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
    message = refusal(partial(load_dense, folder))
    assert named in message and str(folder) in message
    doctor = partial(checkup.read_model, str(folder), checkup.CheckTask(str(folder), [], "cpu", "float32"))
    assert refusal(doctor) == message


def test_a_draft_without_weights_reads_the_same_configuration(folder: Path) -> None:
    with_fields("generation_config.json", eos_token_id=-5)(folder)
    tokenizer_json = (folder / "tokenizer.json").read_bytes()
    assert "eos_token_id" in refusal(partial(read_vocabulary, str(folder), tokenizer_json, None))
