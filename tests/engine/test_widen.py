"""Widening keeps the function: logits, greedy text, with tied and untied embeddings, GQA groups and extra layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.widen import Sizes, WideningError, largest_difference, main, widen

DEMO_TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
}


def small_model(**changes: object) -> LlamaForCausalLM:
    """Random weights, norms included: all-one norms would hide a wrong scale."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "initializer_range": 0.2, "rms_norm_eps": 1e-2, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(32, 48, 4, 2),
        Sizes(40, 48, 4, 2),
        Sizes(64, 100, 8, 2),
        Sizes(72, 100, 12, 4),
        Sizes(48, 64, 8, 4, extra_layers=3),
    ],
    ids=["same", "wider stream", "larger groups", "more groups and larger", "extra layers"],
)
def test_logits_are_equal(tied: bool, sizes: Sizes) -> None:
    model = small_model(tie_word_embeddings=tied)
    wide = widen(model, sizes)
    assert wide.config.num_hidden_layers == 2 + sizes.extra_layers
    assert wide.model.embed_tokens.weight.shape == (97, sizes.hidden)
    assert largest_difference(model, wide) < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)], ids=["multi-head", "multi-query"])
def test_other_head_groups(heads: int, kv_heads: int) -> None:
    model = small_model(num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert largest_difference(model, widen(model, Sizes(64, 64, 16, 4))) < 1e-4


def test_a_model_that_leaves_its_head_size_to_the_config() -> None:
    model = small_model(head_dim=None)
    assert largest_difference(model, widen(model, Sizes(96, 64, 8, 4))) < 1e-4


def test_added_parts_are_dense() -> None:
    """Cost is real only when the added input weights are numbers like any others."""
    wide = widen(small_model(), Sizes(64, 100, 8, 4, extra_layers=1))
    for layer in wide.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert (projection.weight != 0).all()


def test_greedy_text_is_equal() -> None:
    model = small_model()
    wide = widen(model, Sizes(64, 96, 8, 4, extra_layers=1))
    prompt = torch.randint(0, 97, (3, 7), generator=torch.Generator().manual_seed(1))
    texts = [m.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0) for m in (model, wide)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(31, 48, 4, 2), "hidden is 31, must be at least the model's own 32"),
        (Sizes(32, 47, 4, 2), "intermediate is 47"),
        (Sizes(32, 48, 2, 2), "heads is 2"),
        (Sizes(32, 48, 4, 1), "kv_heads is 1"),
        (Sizes(32, 48, 4, 2, extra_layers=-1), "extra_layers is -1"),
        (Sizes(32, 48, 7, 2), "heads is 7, must be a multiple of kv_heads, 2"),
        (Sizes(36, 48, 8, 2), "hidden is 36, must be a multiple of heads, 8"),
        (Sizes(32, 48, 4, 4), "heads / kv_heads is 1, must be at least the model's own 2"),
    ],
)
def test_impossible_sizes_are_named(sizes: Sizes, message: str) -> None:
    with pytest.raises(WideningError, match=message):
        widen(small_model(), sizes)


def test_other_models_are_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(WideningError, match="GPT2LMHeadModel"):
        widen(gpt2, Sizes(64, 64, 4, 4))
    with pytest.raises(WideningError, match="biases"):
        widen(small_model(attention_bias=True), Sizes(64, 64, 8, 4))


def test_the_demo_target_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "576", "--intermediate", "1088", "--heads", "9", "--kv-heads", "3", "--extra-layers", "1"]
    assert main([str(DEMO_TARGET), str(tmp_path / "wide"), *sizes]) == 0
    assert "11.0M -> " in capsys.readouterr().out
    model = LlamaForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()
    wide = LlamaForCausalLM.from_pretrained(tmp_path / "wide").eval()
    assert wide.dtype == torch.float32
    assert largest_difference(model, wide) < 1e-4
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (DEMO_TARGET, tmp_path / "wide")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_the_command_line_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DEMO_TARGET), str(tmp_path), "--hidden", "100"]) == 2
    assert "hidden is 100, must be at least the model's own 384" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    assert main([str(tmp_path / "gpt2"), str(tmp_path)]) == 2
    assert "type gpt2" in capsys.readouterr().err
