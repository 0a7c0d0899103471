"""Make a GGUF file of a checkpoint with llama.cpp's own converter. Called by llamacpp.py, once a model and dtype.

    python benchmarks/peers/to_gguf.py LLAMA_CPP_SOURCE MODEL OUT.gguf float32

The converter knows a byte-level BPE by a hash of what it makes of one text, and refuses one that it never saw, such as
the demo pair's. Its splitting rule is GPT-2's, which is what the refusal asks for: so this script gives that one
answer. Gemma's tokenizer it reads from a file of SentencePiece, which the model of `make real-model` has not: there the
vocabulary is copied from the GGUF file that the model was made of. Of that file nothing else is used.
"""

import json
import sys
from pathlib import Path
from typing import Any

OUT_TYPES = {"float32": "f32", "bfloat16": "bf16"}


def check_tokenizer(model: Path) -> None:
    """Exit when the tokenizer is not a byte-level BPE that splits as GPT-2's does."""
    rule = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    rules = rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    last = rules[-1]
    if last["type"] != "ByteLevel" or not last["use_regex"] or last["add_prefix_space"] or len(rules) > 1:
        sys.exit(f"{model} does not split text as GPT-2 does: {rules}; convert it with convert_hf_to_gguf.py yourself")


def copied_vocabulary(file: Path) -> Any:
    """Return a `set_vocab` that writes the vocabulary of another GGUF file."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    values = {
        name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items() if "ggml" in name
    }

    def set_vocab(self: Any) -> None:
        writer = self.gguf_writer
        writer.add_tokenizer_model(values["model"])
        writer.add_tokenizer_pre(values.get("pre", "default"))
        writer.add_token_list(values["tokens"])
        writer.add_token_scores(values["scores"])
        writer.add_token_types(values["token_type"])
        writer.add_bos_token_id(values["bos_token_id"])
        writer.add_eos_token_id(values["eos_token_id"])
        writer.add_add_space_prefix(False)

    return set_vocab


def main() -> None:
    source, model, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import convert_hf_to_gguf as converter
    from conversion.base import TextModel

    if made_of := next((model / "gguf").glob("*.gguf"), None):
        from conversion.gemma import Gemma3Model

        Gemma3Model.set_vocab = copied_vocabulary(made_of)
    else:
        check_tokenizer(model)
        TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # type: ignore[method-assign]
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", out, "--outtype", OUT_TYPES[dtype]]
    converter.main()


if __name__ == "__main__":
    main()
