"""Make a GGUF file of a checkpoint with llama.cpp's own converter. Called by llamacpp.py, once a model and dtype.

    python benchmarks/peers/to_gguf.py LLAMA_CPP_SOURCE MODEL OUT.gguf float32

The converter knows a byte-level BPE by a hash of what it makes of one text, and refuses one that it never saw, such as
the demo pair's. Its splitting rule is GPT-2's, which is what the refusal asks for: so this script gives that one
answer.
"""

import json
import sys
from pathlib import Path

OUT_TYPES = {"float32": "f32", "bfloat16": "bf16"}


def check_tokenizer(model: Path) -> None:
    """Exit when the tokenizer is not a byte-level BPE that splits as GPT-2's does."""
    rule = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    rules = rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    last = rules[-1]
    if last["type"] != "ByteLevel" or not last["use_regex"] or last["add_prefix_space"] or len(rules) > 1:
        sys.exit(f"{model} does not split text as GPT-2 does: {rules}; convert it with convert_hf_to_gguf.py yourself")


def main() -> None:
    source, model, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    check_tokenizer(model)
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import convert_hf_to_gguf as converter
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # type: ignore[method-assign]
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", out, "--outtype", OUT_TYPES[dtype]]
    converter.main()


if __name__ == "__main__":
    main()
