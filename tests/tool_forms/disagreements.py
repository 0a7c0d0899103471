"""Where vLLM 0.32.0 reads a text otherwise than Outrider does, and what decides: the model's chat template.

The program `tests/tool_forms` shows these sentences. Keys are the name of a family, `EVERY` for all of them, and a kind
of text. Outrider follows the template in each; where it did not, it was mended and stands here no more.
"""

from __future__ import annotations

from collections.abc import Mapping

EVERY = "*"
"""Stands for every family that has no sentence of its own for the kind."""

DISAGREEMENTS: Mapping[tuple[str, str], str] = {
    # every family
    (EVERY, "text after the calls"): (
        "Most of vLLM's parsers drop text behind the last call. Outrider passes it on: the model has written it."
    ),
    (EVERY, "cut in an argument"): (
        "vLLM, whole, returns content, no call or a call without arguments; streamed, what had come. Outrider "
        "returns what had come, whole and streamed: finish_reason is then length."
    ),
    (EVERY, "cut behind the arguments"): (
        "Some of vLLM's parsers return content, whole. Outrider returns the call: its arguments are complete."
    ),
    (EVERY, "unknown tool"): (
        "vLLM returns a call of a tool that the request does not offer. Outrider returns its text as content."
    ),
    (EVERY, "empty arguments"): (
        "Several of vLLM's parsers stream no arguments at all, which is no JSON. Outrider streams {}."
    ),
    # values
    ("qwen3_coder", "None where null is allowed"): (
        "vLLM returns the string None. The template writes a null as None, so Outrider returns null."
    ),
    ("qwen3_coder", "number with a fraction of zero"): (
        "vLLM returns 3.0 for the integer 3.0 and 3 for the number 3.0, Outrider 3 and 3.0: the values are equal."
    ),
    ("qwen3_coder", "tags inside a value"): (
        "vLLM ends a value at the first tag in it. The template writes values as they are, so Outrider ends one where "
        "another parameter or the call's end follows."
    ),
    ("qwen3_coder", "no tag in front of the call"): (
        "vLLM reads <function=f> without <tool_call>. The template never writes it so: Outrider returns it as content."
    ),
    ("qwen3_coder", "no end of a parameter"): (
        "vLLM ends a parameter where the next begins. The template always closes it: Outrider reads on in the value."
    ),
    ("seed_oss", "line break at the ends of a value"): (
        "vLLM drops a line break on each side. The template writes values without any of its own: Outrider keeps both."
    ),
    ("minimax_m2", "names without double quotes"): (
        "vLLM reads names in single quotes or none. The template has double quotes: others are content in Outrider."
    ),
    ("deepseek_v32", "string against the schema"): (
        "vLLM follows the schema alone. The template says of each value whether it is a string: Outrider follows that, "
        'and string="true" with 3 is "3".'
    ),
    ("deepseek_v32", "parameter without string"): (
        "vLLM reads a parameter that says not whether it is a string. The template always says: it is content here."
    ),
    ("gemma4", "values without a schema"): (
        "vLLM returns strings for numbers and words that no schema names, such as nested ones. The template quotes "
        "strings and nothing else, so Outrider returns 1, true and null."
    ),
    ("gemma4", "quoted value against the schema"): (
        "vLLM follows the schema: a quoted 3 is 3 for an integer. The template quotes strings alone: it is a string."
    ),
    ("functiongemma", "values that are no strings"): (
        "vLLM's parser finds values between two <escape> alone and loses others. The template writes numbers, words, "
        "lists and objects without: Outrider reads them."
    ),
    ("functiongemma", "string that looks like JSON"): (
        "vLLM makes a number of a quoted 75001. The template quotes strings alone: Outrider returns a string."
    ),
    ("functiongemma", "name with a hyphen"): (
        "vLLM's parser takes letters, digits and underscores alone. Outrider takes the name of any tool of the request."
    ),
    ("step3", "lists, objects and null"): (
        "vLLM returns the text of a list, an object or a null as a string. Outrider follows the schema."
    ),
    ("step3", "tags and white space inside a value"): (
        "vLLM loses a value that holds < and drops white space at its ends. Outrider keeps values as they are."
    ),
    ("step3", "whole number"): "vLLM returns 2.0 for the number 2: the values are equal.",
    # calls
    (
        "kimi_k2",
        "name without a number",
    ): "vLLM needs the number behind the name. Outrider reads the call without it too.",
    ("deepseek_v3", "white space between the parts"): (
        "vLLM's parser takes no line break behind the first token and none inside the arguments. Outrider takes any."
    ),
    ("mistral_args", "no [ARGS]"): (
        "vLLM takes a brace for the end of a name. The template writes [ARGS]: Outrider returns other texts as content."
    ),
    ("mistral", "one object without a list"): (
        "vLLM reads it as a call. The template writes a list: Outrider returns the text as content."
    ),
    ("lfm2", "name with a hyphen"): "vLLM parses Python, where a name has none. Outrider takes the name of any tool.",
    ("olmo3", "name with a hyphen"): "vLLM parses Python, where a name has none. Outrider takes the name of any tool.",
    ("llama4_pythonic", "name with a hyphen"): (
        "vLLM parses Python, where a name has none. Outrider takes the name of any tool."
    ),
    ("olmo3", "text before the calls"): (
        "vLLM drops it, whole, and reads no calls, streamed. Outrider returns both, whole and streamed."
    ),
    (
        "olmo3",
        "no tags",
    ): "vLLM reads calls without tags, whole. The template writes <function_calls>: Outrider wants them.",
    ("phi4_mini_json", "every text"): (
        "vLLM's parser of this name reads functools[...], Outrider's family phi4_functools, which vLLM's own template "
        "asks for. Microsoft's template and llama.cpp's have <|tool_call|>, which vLLM does not read."
    ),
    ("phi4_functools", "brackets inside the arguments"): (
        "vLLM's parser ends the list at the first closing bracket and loses the calls. Outrider reads them."
    ),
    ("phi4_functools", "streamed"): "vLLM's parser streams nothing, neither calls nor content.",
    ("granite", "<tool_call> in place of <|tool_call|>"): (
        "vLLM reads both. The template has <|tool_call|>: Outrider returns the other as content."
    ),
    ("granite-20b-fc", "text before the calls"): "vLLM reads the calls whole, and not streamed. Outrider reads both.",
    ("hunyuan_a13b", "streamed"): (
        "vLLM's parser streams <tool_calls> as content, loses nested arguments and, behind text, the calls. Outrider "
        "streams the calls that it reads whole. vLLM's jamba streams no valid JSON a character at a time."
    ),
    ("internlm", "two calls"): "vLLM's parser raises an error. Outrider reads both calls.",
    ("hermes", "arguments in front of the name"): (
        "vLLM streams the rest of the object as arguments. Outrider waits for the whole object."
    ),
    ("hermes", "arguments in a string"): (
        "vLLM returns a JSON string that holds an object. Outrider returns the object."
    ),
    ("hermes", "no arguments"): "vLLM reads no call, whole. Outrider reads one with {}.",
    ("llama3_json", "text before the calls"): (
        "vLLM reads the call, whole, and drops the text; streamed, it reads none. The template asks for the object: "
        "Outrider returns the text as content."
    ),
    ("llama3_json", "two calls"): (
        'vLLM, streamed, reads the second only behind "; ". Outrider reads it behind white space, a comma or semicolon.'
    ),
    ("cohere_command", "empty arguments"): "vLLM returns no arguments, which is no JSON. Outrider returns {}.",
    ("cohere_command", "no tool_call_id"): (
        "vLLM reads no call. The template always writes the id; Outrider reads the call without it too."
    ),
    ("json", "one object without a list"): (
        "vLLM's xlam reads lists alone. Its template writes a list also for one call; Outrider reads both."
    ),
    ("json", "in a code fence or tags"): (
        "vLLM's xlam also reads calls in a code fence, <tool_call> or [TOOL_CALLS]. Its template writes a bare list: "
        "Outrider returns the others as content."
    ),
    ("json", "two calls"): "vLLM's xlam, streamed, loses the arguments of the last of several calls.",
    ("openai", "recipient without functions."): (
        "vLLM reads to=f as a call of f. The template writes to=functions.f: Outrider returns the others as content."
    ),
    ("openai", "text outside channels"): ("vLLM drops it, or a part of it. Outrider returns it as content."),
}
"""(family, kind of text) -> who reads what, and why."""

REASONING_DISAGREEMENTS: Mapping[tuple[str, str], str] = {
    (EVERY, "no mark at all"): (
        "Most of vLLM's parsers take the whole text for reasoning. Outrider follows the prompt: where it has not begun "
        "reasoning, a text without the first mark is an answer."
    ),
    (EVERY, "reasoning that the prompt has ended"): (
        "vLLM, whole, does not look at the prompt and takes the answer for reasoning; streamed, it agrees."
    ),
    (EVERY, "last mark again in the answer"): (
        "vLLM drops it, whole; streamed, most parsers pass it on. Outrider passes it on: the text is the model's."
    ),
    ("think", "deepseek_v3"): (
        "vLLM's parser of this name reads reasoning where the request asks for thinking. Outrider follows the marks."
    ),
    ("think", "step3"): "vLLM's parser keeps the first mark in the reasoning. Outrider takes marks for no part of it.",
    ("think", "minimax_m2_append_think"): "vLLM puts the reasoning into the content. Outrider has no such parser.",
    ("think", "olmo3"): "vLLM's parser needs tokens of the model's own tokenizer: it was not tried.",
    ("hunyuan_a13b", EVERY): (
        "vLLM's parser wants exact line breaks around the tags, and ids of the model's own tokenizer when it streams."
    ),
    ("ernie45", "streamed"): "vLLM's parser leaves <response> and </response> in a stream. Outrider drops both.",
    ("granite", "streamed"): (
        "vLLM's parser leaves the word Here of the last mark in the reasoning, where a token is a character."
    ),
    (
        "granite",
        "begun by the prompt",
    ): "vLLM's parser needs the first mark in the text. Outrider also looks at the prompt.",
    ("gemma4", "streamed"): (
        "vLLM's parser takes a prompt without any mark for one that has ended reasoning. Outrider follows the text."
    ),
    ("cohere_command", "begun by the prompt"): (
        "vLLM's cohere_command3 does not look at the prompt; cohere_command4 does, as Outrider."
    ),
}
"""(family of reasoning, kind of text or vLLM's parser) -> who reads what, and why."""
