"""Where vLLM 0.32.0 reads a text of the table otherwise than it was written, and who is right: the template decides.

`make tool-forms` fails for a difference that has no sentence here, and for a sentence that no difference has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.tool_forms.chats import ANSWERS


@dataclass(frozen=True)
class Disagreement:
    """Answers that vLLM's parser does not read as the template means them."""

    names: tuple[str, ...]
    """Families, or templates."""
    answers: tuple[str, ...]
    """Names of answers in `chats.ANSWERS`."""
    why: str


_NONE = "vLLM returns the string None. The template prints a null as None: Outrider returns null."
DISAGREEMENTS: Sequence[Disagreement] = (
    Disagreement(
        ("minja-Qwen-Qwen3-Coder-30B-A3B-Instruct", "gguf-qwen3-coder-30b", "seed_oss"),
        ("each type", "letters", "quotes", "nested"),
        "vLLM returns a printed list or object as a string. The tool's schema has a list or an object: Outrider "
        "returns that.",
    ),
    Disagreement(("qwen3_coder", "gemma4"), ("each type",), _NONE),
    Disagreement(
        ("hy_v3",),
        ("each type",),
        "vLLM returns the string null. The schema has a string or a null, and the template prints a null as null: "
        "Outrider returns null.",
    ),
    Disagreement(
        ("gemma4",),
        ("nested",),
        "vLLM returns strings for values that no schema names. The template quotes strings alone: Outrider returns 1 "
        "and false.",
    ),
    Disagreement(
        ("mistral_call_id",),
        tuple(ANSWERS),
        "vLLM returns [CALL_ID] and the id as a part of the name. The template writes both behind the name: Outrider "
        "returns the name alone.",
    ),
    Disagreement(
        ("mistral", "mistral_spaced", "mistral_args"),
        ("tags",),
        "vLLM ends a call at the text [TOOL_CALLS] inside a string. The arguments are JSON: Outrider reads them to "
        "their end.",
    ),
    Disagreement(
        ("functiongemma",),
        ("each type", "letters", "quotes", "lines", "nested"),
        "vLLM returns a number for a quoted 3 and strings for lists, and streams no JSON for several arguments. The "
        "tool's schema tells strings from others: Outrider follows it, save for a quoted None, which may be a string.",
    ),
    Disagreement(
        ("functiongemma", "granite-20b-fc", "cohere_command", "internlm", "llama3_json", "llama4_json"),
        ("no arguments",),
        "vLLM returns an empty text for the arguments, which is no JSON. Outrider returns {}.",
    ),
    Disagreement(
        ("gguf-llama4-latest",),
        tuple(ANSWERS),
        "vLLM streams the empty tags of Python, and the calls behind them, as content. Outrider skips the tags.",
    ),
    Disagreement(
        ("llama4_json",),
        ("two calls",),
        'vLLM reads a second call behind "; " alone. The template writes none: Outrider reads both calls.',
    ),
    Disagreement(
        ("llama4_json", "vllm-tool_chat_template_llama4_pythonic", "vllm-tool_chat_template_gemma3_pythonic"),
        ("text before",),
        "Neither reads a call behind text, save that vLLM reads llama4_json's where it is not streamed. The prompt "
        "asks for calls alone.",
    ),
    Disagreement(
        ("vllm-tool_chat_template_llama4_pythonic",),
        ("one call", "two calls", "each type", "letters", "nested"),
        "vLLM returns quoted values as strings. The tool's schema tells strings from others: Outrider follows it. "
        "Neither takes a quoted None, which may be a string, for a null.",
    ),
    Disagreement(
        ("vllm-tool_chat_template_llama4_pythonic",),
        ("quotes", "lines"),
        "The template leaves a quote and a line break inside a string as they are, which is no Python. vLLM reads no "
        "call, Outrider the one with line breaks.",
    ),
    Disagreement(
        ("vllm-tool_chat_template_gemma3_pythonic",),
        ("each type", "letters", "quotes", "lines"),
        "The template has no comma between past arguments, which is no Python: neither reads it. Its prompt asks for "
        "commas.",
    ),
    Disagreement(
        ("vllm-tool_chat_template_llama3.2_pythonic", "vllm-tool_chat_template_toolace"),
        ("two calls", "text before", "each type", "letters", "quotes", "lines", "tags"),
        "The template writes past strings without quotes, which is no Python: neither reads it. Its prompt asks for "
        "quotes.",
    ),
    Disagreement(
        ("LFM2.5-8B-A1B",),
        ("lines",),
        r"The template leaves a backslash as it is: both read C:\new as Python does, with a line break.",
    ),
    Disagreement(
        ("phi4_mini_json",),
        tuple(ANSWERS),
        "The template leaves functools out of past calls: neither reads one. Its prompt asks for functools[...].",
    ),
    Disagreement(
        ("hunyuan_a13b",),
        ("text before", "each type", "nested"),
        "vLLM streams <tool_calls> as content and loses calls behind text and nested arguments; not streamed, it reads "
        "them. Outrider reads the same both ways.",
    ),
    Disagreement(("internlm",), ("two calls",), "vLLM's parser raises an error. Outrider reads both calls."),
    Disagreement(
        ("ibm-granite-granite-4.0", "ibm-granite-granite-4.1"),
        ("tags",),
        "vLLM's granite4 raises an error at a <tool_call> inside a string, where it is not streamed. The arguments are "
        "JSON: Outrider reads them to their end.",
    ),
    Disagreement(
        ("json",),
        ("each type", "nested"),
        "vLLM's xlam streams no arguments that have an object inside. Outrider streams them.",
    ),
)


def explanation(template: str, family: str, answer: str) -> Disagreement | None:
    """Return the sentence for a difference, the template's own before its family's; None if there is none."""
    for name in (template, family):
        for disagreement in DISAGREEMENTS:
            if name in disagreement.names and answer in disagreement.answers:
                return disagreement
    return None
