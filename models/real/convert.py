"""`python -m models.real.convert FILE.gguf FOLDER`: write a checkpoint of transformers, and refuse a wrong one.

Called by `models.real.make`, with `gguf` on the path. Weights are unpacked and rounded to bfloat16, the type that the
model was published in. Exits with words when the tokenizer or the weights are not what the file holds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from models.real.sentencepiece import SPACE, SentencePiece

REPOSITORY = Path(__file__).resolve().parents[2]
PERPLEXITY = 30.0
"""Maximum perplexity of the converted model on LICENSE. The right model has 10. A wrong weight or setting, such as one
norm or rotary base, makes it hundreds."""
KNOWN = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Settings of Gemma 3 270M that the converted configuration must have. The GGUF file lacks some of them, such as the
pattern of attention windows; these come from transformers' defaults, which may change."""
SCRIPTS = (
    "Grüße aus München, ça va bien ? Привет, мир! 你好,世界。こんにちは。안녕하세요 مرحبا بالعالم नमस्ते สวัสดี Γειά σου",
    "emoji 😀 👩‍👩‍👧 🇩🇪 ❤️ and signs ≠ ∑ → ½ \u200b \ufffd 𓀀",
    "<b>bold</b> <table><tr><td>1</td></tr></table> <start_of_turn>user\nhi<end_of_turn>\n",
    "\n\n\n  two   three    four\t\ttabs\r\nend  ",
)
"""Texts to check the tokenizer with, in scripts and signs that code and documentation hardly have."""
LONGEST_RUN = 31
"""Maximum number of spaces in a row in texts that check the tokenizer. In longer runs transformers joins other tokens
than SentencePiece does, although both decode to the same text."""


def main() -> None:
    file = Path(sys.argv[1])
    folder = Path(sys.argv[2])
    from_file: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    network: Any = AutoModelForCausalLM.from_pretrained(
        **from_file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    check_config(network.config)
    network.config.rms_norm_eps = round(network.config.rms_norm_eps, 12)  # the file has it in float32
    network.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    AutoTokenizer.from_pretrained(**from_file).save_pretrained(folder)
    check_tokenizer(file, folder)
    check_weights(folder)


def check_config(config: Any) -> None:
    found = {name: getattr(config, name) for name in KNOWN}
    if wrong := {name: found[name] for name in KNOWN if found[name] != KNOWN[name]}:
        sys.exit(f"this release of transformers makes of the file {wrong}, must be {[KNOWN[name] for name in wrong]}")
    if getattr(config, "quantization_config", None) is not None:
        sys.exit("this release of transformers keeps the weights packed; install the one in constraints.txt")


def check_tokenizer(file: Path, folder: Path) -> None:
    fields = GGUFReader(file).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    truth = SentencePiece(read("tokens"), read("scores"), read("token_type"), read("bos_token_id"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sources = [*REPOSITORY.glob("outrider/**/*.py"), *REPOSITORY.glob("docs/**/*.md")]
    texts = [*SCRIPTS, *(path.read_text(encoding="utf-8") for path in sources)]
    texts = [text for text in texts if " " * (LONGEST_RUN + 1) not in text]
    num_tokens = 0
    for text in texts:
        ids = tokenizer.encode(text).ids
        num_tokens += len(ids)
        if ids != truth.encode(text):
            sys.exit(f"the converted tokenizer cuts in another way than the file says: {text[:80]!r}")
        if tokenizer.decode(ids, skip_special_tokens=False) != "<bos>" + text.replace(SPACE, " "):
            sys.exit(f"the converted tokenizer does not give back {text[:80]!r}")
    print(f"the tokenizer cuts {len(texts)} texts into {num_tokens} tokens as the file says", flush=True)


@torch.inference_mode()
def check_weights(folder: Path) -> None:
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")[:3000]
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])  # [1, T]
    perplexity = float(network(ids, labels=ids).loss.exp())
    if not perplexity < PERPLEXITY:
        sys.exit(f"the converted weights have a perplexity of {perplexity:.1f} on LICENSE, must be below {PERPLEXITY}")
    print(f"perplexity of the first {ids.shape[1]} tokens of LICENSE: {perplexity:.2f}", flush=True)


if __name__ == "__main__":
    main()
