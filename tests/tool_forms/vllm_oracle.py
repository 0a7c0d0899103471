"""What vLLM's parsers read in texts of models: the second oracle of the forms in which calls are read.

It runs in vLLM's environment, which `make peers` installs, and imports nothing of Outrider:

    .work/peers/vllm/bin/python tests/tool_forms/vllm_oracle.py < cases.json > results.json

    {"cases": [{"id": "1", "parser": "hermes", "text": "<tool_call>...", "tools": [...], "vocabulary": [...],
      "tokenizer_settings": {}}]}
    {"results": [{"id": "1", "whole": {"content": null, "calls": [{"name": "f", "arguments": "{}"}]}, "streamed": ...}]}

`vocabulary`: the texts that are one token each. `tokenizer_settings`: what the model's tokenizer_config.json has
besides. `openai` reads tokens of gpt-oss, whatever the vocabulary: they come
with the package openai-harmony.

The texts go through what vLLM's server calls, `Parser.parse` and `Parser.parse_delta`, the latter a token at a time: a
byte, or a text of the vocabulary. `{"error": ...}` stands for what raised.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

END = "<|vllm_oracle_end|>"
"""Text of the token that ends an output."""


def main() -> int:
    cases = json.load(sys.stdin)["cases"]
    # vLLM writes logs to the standard output: only the results belong there
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    results = [result_of(case) for case in cases]
    json.dump({"results": results}, output)
    output.write("\n")
    output.close()
    return 0


def result_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": case["id"],
        "whole": _or_error(case, read_whole),
        "streamed": _or_error(case, read_streamed),
    }


def _or_error(case: dict[str, Any], read: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(case)
    except Exception as error:  # whatever a parser of vLLM's raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}


def read_whole(case: dict[str, Any]) -> dict[str, Any]:
    """Read the text as an answer that is not streamed."""
    parser, request = _parser_of(case)
    parser.set_prompt_token_ids([])
    _, content, calls = parser.parse(
        case["text"], request, enable_auto_tools=True, model_output_token_ids=_output_ids(case)
    )
    found = [{"name": call.name, "arguments": call.arguments} for call in calls or ()]
    return {"content": content or None, "calls": found}


def read_streamed(case: dict[str, Any]) -> dict[str, Any]:
    """Read the text a token at a time, and join what each returned."""
    from tokenizers.decoders import DecodeStream

    parser, request = _parser_of(case)
    tokenizer = tokenizer_of(tuple(case["vocabulary"]), tuple(case["tokenizer_settings"].items()))
    ids = _output_ids(case)
    stream = DecodeStream(skip_special_tokens=False)
    content = ""
    calls = dict[int, dict[str, str]]()
    for number, token_id in enumerate(ids):
        text = ""
        if token_id != tokenizer.eos_token_id and not _is_harmony(case):
            text = stream.step(tokenizer.backend_tokenizer, token_id) or ""
        is_last = number == len(ids) - 1
        delta = parser.parse_delta(text, [token_id], request, prompt_token_ids=[], finished=is_last)
        if delta is None:
            continue
        content += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"name": "", "arguments": ""})
            if part.function is not None:
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return {"content": content or None, "calls": [calls[index] for index in sorted(calls)]}


def _parser_of(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return vLLM's parser of a case, and the request that it reads for."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    request = ChatCompletionRequest(
        model="model", messages=[{"role": "user", "content": "Hello."}], tools=case["tools"], tool_choice="auto"
    )
    parser_class = ParserManager.get_parser(
        tool_parser_name=case["parser"], enable_auto_tools=True, is_harmony=_is_harmony(case)
    )
    assert parser_class is not None
    tokenizer = tokenizer_of(tuple(case["vocabulary"]), tuple(case["tokenizer_settings"].items()))
    return parser_class(tokenizer, request.tools, chat_template_kwargs={}, model_config=None), request


@cache
def tokenizer_of(vocabulary: tuple[str, ...], settings: tuple[tuple[str, str], ...]) -> Any:
    """Return a tokenizer of bytes, and of one token for each text of the vocabulary. `settings`: names and values."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    data = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    data.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    data.decoder = decoders.ByteLevel()
    texts = sorted({*vocabulary, END})
    data.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    return PreTrainedTokenizerFast(
        tokenizer_object=data, eos_token=END, clean_up_tokenization_spaces=False, **dict(settings)
    )


def _is_harmony(case: dict[str, Any]) -> bool:
    return bool(case["parser"] == "openai")


def _output_ids(case: dict[str, Any]) -> list[int]:
    if _is_harmony(case):
        from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

        return list(get_encoding().encode(case["text"], allowed_special="all"))
    tokenizer = tokenizer_of(tuple(case["vocabulary"]), tuple(case["tokenizer_settings"].items()))
    return [*tokenizer.encode(case["text"], add_special_tokens=False), tokenizer.eos_token_id]


if __name__ == "__main__":
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    # in this order: vLLM's own order of imports is circular with transformers' newest
    import transformers.configuration_utils  # noqa: F401

    logging.basicConfig(stream=sys.stderr)
    sys.exit(main())
