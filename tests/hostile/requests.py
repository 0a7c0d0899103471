"""Requests that cost a gateway much: valid ones that are answered, and hostile ones that nobody should send.

Each kind is a function of a random number generator, so that a seed says all. What tests/fuzz draws is among them:
bodies of every endpoint with parts changed, and schemas, expressions and grammars from fine to endless.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import VALID as VALID_BODIES
from tests.fuzz.bodies import changed, names_of
from tests.fuzz.hints import structured_hints

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
INPUT_TOKENS, COUNT_TOKENS = "/v1/responses/input_tokens", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

CHAT_TEMPLATE = """\
{%- if table is defined -%}
{%- for row in range(table.rows) -%}{%- for column in range(table.columns) -%}
{%- if table.shows -%}{{- row * column ~ ' ' -}}{%- endif -%}
{%- endfor -%}{%- endfor -%}
{%- endif -%}
{%- if pad is defined -%}{{- 'x'.center(pad) -}}{%- endif -%}
{%- if doubled is defined -%}
{%- set ns = namespace(text='x') -%}
{%- for _ in range(doubled) -%}{%- set ns.text = ns.text ~ ns.text -%}{%- endfor -%}{{- ns.text -}}
{%- endif -%}
{%- if data is defined -%}{{- data | tojson(indent=indent | default(1)) -}}{%- endif -%}
"""
"""What is put in front of the model's own chat template: variables of a request that make it loop, pad and print."""

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "sleeps", "é", "😀")
BURST = 20
"""Requests that are sent at once."""
_FEW_TOKENS = 4
"""Output tokens of most requests: what is tried is the gateway, not the pair's speed."""


@dataclass(frozen=True)
class HostileRequest:
    """One request, and what is known of it."""

    kind: str
    path: str
    body: bytes
    is_valid: bool
    """Whether it has to be answered with 200 where nothing else runs."""
    patience_s: float = 30.0
    """Seconds after which its client leaves."""
    content_type: str = "application/json"


Made = tuple[str, Any]
"""(path, body): an object that is written as JSON, or bytes that are sent as they are."""
Maker = Callable[[random.Random], Made]
VALID: dict[str, Maker] = {}
HOSTILE: dict[str, Maker] = {}


def _valid(maker: Maker) -> Maker:
    VALID[maker.__name__] = maker
    return maker


def _hostile(maker: Maker) -> Maker:
    HOSTILE[maker.__name__] = maker
    return maker


def _hostile_each(made: Callable[..., Made], values: dict[str, Any]) -> None:
    """Add a kind for each value. made: a request of one."""
    for name, value in values.items():
        HOSTILE[f"{made.__name__}: {name}"] = partial(made, value=value)


def text_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _wide(rng: random.Random, num_properties: int) -> dict[str, Any]:
    """Return the schema of an object, another each time, so that no cache knows it."""
    salt = rng.randrange(10**9)
    kinds: list[Any] = [
        {"type": "string", "maxLength": 20},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        {"enum": ["red", "green", "blue"]},
        {"type": ["number", "null"]},
    ]
    properties = {f"p{salt}_{index}": rng.choice(kinds) for index in range(num_properties)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _tools(rng: random.Random, num_tools: int, num_properties: int) -> list[dict[str, Any]]:
    tools = []
    for index in range(num_tools):
        function = {"name": f"tool_{index}", "description": text_of(rng, 8)}
        tools.append({"type": "function", "function": {**function, "parameters": _wide(rng, num_properties)}})
    return tools


def _structured(rng: random.Random, output: dict[str, Any]) -> Made:
    """Ask for it by one of the endpoints that take vLLM's structured outputs."""
    common = {"max_tokens": _FEW_TOKENS, "structured_outputs": output}
    if rng.random() < 0.5:
        return COMPLETIONS, {"prompt": "Answer:", **common}
    return CHAT, {"messages": _user("Answer"), **common}


def _of_schema(rng: random.Random, schema: Any) -> Made:
    """Ask for a JSON text of the schema by any endpoint that takes one."""
    path = rng.choice([COMPLETIONS, CHAT, RESPONSES, MESSAGES])
    if path == RESPONSES:
        form = {"type": "json_schema", "name": "a", "schema": schema}
        return path, {"input": "Answer", "max_output_tokens": _FEW_TOKENS, "text": {"format": form}}
    if path == MESSAGES:
        form = {"type": "json_schema", "schema": schema}
        body = {"messages": _user("Answer"), "max_tokens": _FEW_TOKENS, "output_config": {"format": form}}
        return path, {**body}
    if path == CHAT:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return path, {"messages": _user("Answer"), "max_tokens": _FEW_TOKENS, "response_format": form}
    return path, {"prompt": "Answer:", "max_tokens": _FEW_TOKENS, "structured_outputs": {"json": schema}}


# Valid and expensive.


@_valid
def schema_of_many_properties(rng: random.Random) -> Made:
    return _of_schema(rng, _wide(rng, rng.randint(60, 300)))


@_valid
def schema_of_any_of(rng: random.Random) -> Made:
    return _of_schema(rng, {"anyOf": [_wide(rng, 8) for _ in range(rng.randint(4, 16))]})


@_valid
def schema_of_multiples(rng: random.Random) -> Made:
    return _of_schema(rng, {"type": "integer", "multipleOf": rng.choice([7, 64, 97]), "minimum": 0, "maximum": 10_000})


@_valid
def schema_that_refers_to_itself(rng: random.Random) -> Made:
    node = {"type": "object", "properties": {f"n{rng.randrange(10**6)}": {"type": "array", "items": {"$ref": "#"}}}}
    return _of_schema(rng, node)


@_valid
def regex_of_repeats(rng: random.Random) -> Made:
    letters = "".join(rng.sample("abcdefghijklmnop", 8))
    return _structured(rng, {"regex": f"([{letters}]{{1,30}} ){{1,{rng.randint(5, 30)}}}[0-9]{{1,200}}"})


@_valid
def choice_of_many(rng: random.Random) -> Made:
    salt = rng.randrange(10**6)
    return _structured(rng, {"choice": [f"c{salt}{index}" for index in range(rng.randint(200, 1000))]})


@_valid
def grammar_in_lark(rng: random.Random) -> Made:
    rules = [
        f'r{index}: "{rng.randrange(10**6)}" r{index + 1} | /[a-z]{{1,9}}/' for index in range(rng.randint(20, 90))
    ]
    return _structured(rng, {"grammar": "\n".join(["start: r0", *rules, f"r{len(rules)}: /[0-9]+/"])})


@_valid
def grammar_in_gbnf(rng: random.Random) -> Made:
    rules = [f'r{index} ::= "{rng.randrange(10**6)}" r{index + 1} | [a-z]+' for index in range(rng.randint(20, 90))]
    return _structured(rng, {"grammar": "\n".join(["root ::= r0", *rules, f"r{len(rules)} ::= [0-9]+"])})


@_valid
def tools_that_must_be_called(rng: random.Random) -> Made:
    body = {"messages": _user("Call one"), "max_tokens": _FEW_TOKENS, "tool_choice": "required"}
    return CHAT, {**body, "tools": _tools(rng, rng.randint(4, 10), 3)}


@_valid
def tools_of_messages(rng: random.Random) -> Made:
    tools = [{"name": f"t{index}", "input_schema": _wide(rng, 4)} for index in range(rng.randint(3, 8))]
    return MESSAGES, {"messages": _user("Call"), "max_tokens": _FEW_TOKENS, "tools": tools}


@_valid
def prompt_that_fills_the_context(rng: random.Random) -> Made:
    return COMPLETIONS, {"prompt": text_of(rng, rng.randint(500, 700)), "max_tokens": _FEW_TOKENS}


@_valid
def prompt_that_is_cut(rng: random.Random) -> Made:
    text = text_of(rng, 40_000)
    return COMPLETIONS, {"prompt": text, "max_tokens": _FEW_TOKENS, "truncate_prompt_tokens": rng.choice([-1, 100])}


@_valid
def prompt_with_scores(rng: random.Random) -> Made:
    return COMPLETIONS, {"prompt": text_of(rng, 200), "max_tokens": 1, "prompt_logprobs": 20}


@_valid
def many_choices(rng: random.Random) -> Made:
    return COMPLETIONS, {"prompt": text_of(rng, 20), "max_tokens": 8, "n": rng.randint(4, 16), "logprobs": 20}


@_valid
def beams(rng: random.Random) -> Made:
    return COMPLETIONS, {"prompt": text_of(rng, 20), "max_tokens": 6, "n": 4, "use_beam_search": True}


@_valid
def many_messages(rng: random.Random) -> Made:
    messages = [{"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(rng.randint(100, 300))]
    return CHAT, {"messages": messages, "max_tokens": _FEW_TOKENS}


@_valid
def lists_of_words(rng: random.Random) -> Made:
    words = [text_of(rng, 2) for _ in range(40)]
    bias = {str(token_id): rng.uniform(-5, 5) for token_id in rng.sample(range(4000), 250)}
    body = {"bad_words": words, "stop": [text_of(rng, 30) for _ in range(4)], "logit_bias": bias}
    return COMPLETIONS, {"prompt": "x", "max_tokens": 8, **body}


@_valid
def template_that_prints(rng: random.Random) -> Made:
    table = {"rows": 20, "columns": rng.randint(5, 15), "shows": True}
    body = {"messages": _user("x"), "chat_template_kwargs": {"table": table}}
    return rng.choice([(CHAT, {**body, "max_tokens": _FEW_TOKENS}), (TOKENIZE, body)])


@_valid
def text_to_tokenize(rng: random.Random) -> Made:
    return TOKENIZE, {"prompt": text_of(rng, rng.randint(20_000, 60_000)), "return_token_strs": rng.random() < 0.5}


@_valid
def tokens_to_detokenize(rng: random.Random) -> Made:
    return DETOKENIZE, {"tokens": rng.choices(range(5, 4000), k=rng.randint(5_000, 50_000))}


@_valid
def input_to_count(rng: random.Random) -> Made:
    text = text_of(rng, 10_000)
    if rng.random() < 0.5:
        return COUNT_TOKENS, {"messages": _user(text), "system": text_of(rng, 100)}
    return INPUT_TOKENS, {"input": text, "instructions": text_of(rng, 100)}


@_valid
def stream_of_explained_rounds(rng: random.Random) -> Made:
    speculation = {"explain": True, "num_draft_tokens": 8, "metrics": "detailed"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": text_of(rng, 30), "max_tokens": 12, "stream": True, "stream_options": options}
    return COMPLETIONS, {**body, "speculation": speculation}


# Hostile.


def multiple_of(rng: random.Random, value: float) -> Made:
    kind = "integer" if isinstance(value, int) else "number"
    return _of_schema(rng, {"type": kind, "multipleOf": value})


_hostile_each(multiple_of, {str(each): each for each in (7_919, 99_991, 999_983, 2**31 - 1, 0.0007, 1e-9, 3.33333)})


@_hostile
def multiples_together(rng: random.Random) -> Made:
    primes = rng.sample([97, 89, 83, 79, 73, 71, 67, 61, 59, 53], 5)
    return _of_schema(rng, {"allOf": [{"type": "integer", "multipleOf": prime} for prime in primes]})


@_hostile
def schema_of_400_properties(rng: random.Random) -> Made:
    return _of_schema(rng, _wide(rng, rng.randint(400, 512)))


@_hostile
def schema_of_counted_properties(rng: random.Random) -> Made:
    names = {f"o{index}": {"type": "integer"} for index in range(rng.randint(20, 32))}
    return _of_schema(rng, {"type": "object", "properties": names, "minProperties": len(names) // 2})


@_hostile
def schema_of_deep_any_of(rng: random.Random) -> Made:
    schema: dict[str, Any] = {"type": "string", "maxLength": rng.randint(1, 99)}
    for level in range(rng.randint(10, 31)):
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": level}]}
        if len(json.dumps(schema)) > 300_000:
            break
    return _of_schema(rng, schema)


@_hostile
def schema_of_all_of_any_of(rng: random.Random) -> Made:
    branches = [{"anyOf": [{"pattern": f"[a-{chr(98 + each)}]*x"} for each in range(4)]} for _ in range(8)]
    return _of_schema(rng, {"type": "string", "allOf": branches})


@_hostile
def schema_of_reference_cycles(rng: random.Random) -> Made:
    num = rng.randint(3, 200)
    names = {f"d{index}": {"$ref": f"#/$defs/d{(index + 1) % num}"} for index in range(num)}
    return _of_schema(rng, {"$defs": names, "$ref": "#/$defs/d0"})


@_hostile
def schema_of_references_that_double(rng: random.Random) -> Made:
    def level(index: int) -> dict[str, Any]:
        below = {"$ref": f"#/$defs/d{index + 1}"}
        return {"type": "object", "properties": {"a": below, "b": below}, "required": ["a", "b"]}

    definitions: dict[str, Any] = {f"d{index}": level(index) for index in range(rng.randint(20, 60))}
    definitions[f"d{len(definitions)}"] = {"type": "null"}
    return _of_schema(rng, {"$defs": definitions, "$ref": "#/$defs/d0"})


@_hostile
def enum_of_100_000(rng: random.Random) -> Made:
    return _of_schema(rng, {"enum": [f"e{rng.randrange(10**9)}" for _ in range(100_000)]})


@_hostile
def schema_with_patterns(rng: random.Random) -> Made:
    patterns = [r"^(a|aa)+$", r"^(.*a){20}$", r"^(.*a){12}.{300}$", r"^[^\n]{0,9000}x[^\n]{0,9000}$", "(x+x+)+y"]
    names = {f"p{index}": {"type": "string", "pattern": rng.choice(patterns)} for index in range(rng.randint(1, 30))}
    return _of_schema(rng, {"type": "object", "properties": names, "required": list(names)})


@_hostile
def schema_of_large_counts(rng: random.Random) -> Made:
    inner = {"type": "array", "items": {"type": "string", "minLength": 9_999, "maxLength": 10_000}}
    return _of_schema(
        rng, {"type": "array", "items": {**inner, "minItems": 9_000}, "maxItems": rng.choice([50, 10_000])}
    )


@_hostile
def schema_nested_without_end(rng: random.Random) -> Made:
    depth = rng.choice([60, 900, 5_000])
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    return CHAT, (
        b'{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":'
        b'{"name":"a","schema":' + schema.encode() + b"}}}"
    )


def regex(rng: random.Random, value: str) -> Made:
    return _structured(rng, {"regex": value})


_LETTERS = "|".join("abcdefghijklmnopqrstuvwxyz")
_hostile_each(
    regex,
    {
        "letters 1000 times": f"({_LETTERS}){{1000}}",
        "words of letters": f"(({_LETTERS}){{1,100}} ){{1,100}}",
        "repeats of repeats": "((((a{1,30}){1,30}){1,30}){1,30}){1,30}",
        "states that double": "(.*a){15}.{500}",
        "one of many ways": "(.|a|aa|aaa){0,9999}b",
        "anything 200 times": ".*" * 200 + "x",
        "gaps": "[^a]*a[^b]{900}b" * 3,
        "classes": r"(\p{L}|\p{N}){0,3000}\p{Lu}",
        "backtracking": "(x+x+)+y",
        "bounds": "a{0,10000}{0,10000}",
        "brackets": "(" * 900 + "a" + ")" * 900,
    },
)


@_hostile
def choices_that_are_huge(rng: random.Random) -> Made:
    choices = rng.choice(
        [[f"c{index}" for index in range(50_000)], ["a" * 400_000], ["ab" * 4000 + str(i) for i in range(20)]]
    )
    return _structured(rng, {"choice": choices})


def lark(rng: random.Random, value: str) -> Made:
    return _structured(rng, {"grammar": value})


_OPTIONAL = " ".join(f"A{index}?" for index in range(300))
_hostile_each(
    lark,
    {
        "optional parts": f"start: {_OPTIONAL}" + "".join(f'\nA{index}: "a"' for index in range(300)),
        "ambiguous": 'start: a\na: a a a | "x" |',
        "large repeats": "start: A{1,9000}\nA: /[a-z]{1,9000}/",
        "joined": "start: A\nA: /(.*a){12}.{400}/ & /(.*b){12}.{300}/ & ~/(.*c){9}/",
        "brackets": "start: " + "(" * 2000 + '"a"' + ")" * 2000,
        "repeats of repeats": 'start: (("a"|"b")*{50}){50}',
        "alternatives": "start: " + "|".join(f'"{index}" start' for index in range(3000)),
        "a schema's multiple": 'start: %json {"type": "integer", "multipleOf": 99991}',
    },
)


def gbnf(rng: random.Random, value: str) -> Made:
    return _structured(rng, {"grammar": value})


_DOUBLING = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(200)]
_hostile_each(
    gbnf,
    {
        "itself": "root ::= root root | root",
        "optional parts": "root ::= " + " ".join("[a-z]?" for _ in range(3000)),
        "doubling": "\n".join(["root ::= r0", *_DOUBLING, 'r200 ::= "x"']),
        "repeats of repeats": 'root ::= ("a"{1,1000}){1,1000}',
        "a long text": 'root ::= "' + "a" * 30_000 + '"',
    },
)


def tools(rng: random.Random, value: tuple[int, int]) -> Made:
    body = {"messages": _user("Call"), "max_tokens": _FEW_TOKENS, "tool_choice": rng.choice(["auto", "required"])}
    made = _tools(rng, *value)
    for tool in made:
        tool["function"]["strict"] = True
    return CHAT, {**body, "tools": made}


_SIZES = [(128, 4), (60, 12), (2, 400), (1000, 2), (20, 30)]
_hostile_each(tools, {f"{num} of {width} parameters": (num, width) for num, width in _SIZES})


@_hostile
def tools_of_exploding_parameters(rng: random.Random) -> Made:
    tool = {
        "name": "t",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_991}}},
    }
    if rng.random() < 0.5:
        tools = [{"type": "function", **tool, "strict": True}]
        return RESPONSES, {"input": "Call", "max_output_tokens": _FEW_TOKENS, "tools": tools, "tool_choice": "required"}
    tools = [{"type": "function", "function": {**tool, "strict": True}}]
    return CHAT, {"messages": _user("Call"), "max_tokens": _FEW_TOKENS, "tools": tools, "tool_choice": "required"}


@_hostile
def template_that_loops(rng: random.Random) -> Made:
    table = {"rows": 99_999, "columns": 99_999, "shows": rng.random() < 0.5}
    body: dict[str, Any] = {"messages": _user("x"), "chat_template_kwargs": {"table": table}}
    path = rng.choice([CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, INPUT_TOKENS, TOKENIZE])
    if path in (RESPONSES, INPUT_TOKENS):
        return path, {"input": "x", "chat_template_kwargs": body["chat_template_kwargs"]}
    if path == CHAT:
        body["max_tokens"] = _FEW_TOKENS
    if path == MESSAGES:
        body["max_tokens"] = _FEW_TOKENS
    return path, body


def template(rng: random.Random, value: dict[str, Any]) -> Made:
    return CHAT, {"messages": _user("x"), "max_tokens": _FEW_TOKENS, "chat_template_kwargs": value}


_hostile_each(
    template,
    {
        "padding of 50 MB": {"pad": 50_000_000},
        "padding of 3 GB": {"pad": 3_000_000_000},
        "doubled 27 times": {"doubled": 27},
        "doubled 90 times": {"doubled": 90},
        "indent": {"data": ["x"] * 2000, "indent": 9999},
    },
)


@_hostile
def template_of_large_values(rng: random.Random) -> Made:
    data = {f"k{index}": [index] * 20 for index in range(rng.randint(5_000, 20_000))}
    return CHAT, {"messages": _user("x"), "max_tokens": _FEW_TOKENS, "chat_template_kwargs": {"data": data}}


def prompt_of_4_mb(rng: random.Random, value: str) -> Made:
    path = rng.choice([COMPLETIONS, CHAT, TOKENIZE, RESPONSES, COUNT_TOKENS])
    if path == CHAT:
        return path, {"messages": _user(value), "max_tokens": _FEW_TOKENS}
    if path == RESPONSES:
        return path, {"input": value, "max_output_tokens": _FEW_TOKENS}
    if path == COUNT_TOKENS:
        return path, {"messages": _user(value)}
    if path == COMPLETIONS:
        return path, {"prompt": value, "max_tokens": _FEW_TOKENS}
    return path, {"prompt": value}


_hostile_each(
    prompt_of_4_mb,
    {
        "one letter": "x" * 4_000_000,
        "words": text_of(random.Random(0), 1_000_000)[:3_500_000],
        "accents": "é" * 600_000,
        "lines": "\n" * 1_900_000,
        "two letters": "ab" * 1_999_000,
    },
)


@_hostile
def long_word(rng: random.Random) -> Made:
    word = "".join(rng.choices("abcdefgh", k=rng.randint(20_000, 300_000)))
    body = {"prompt": word, "max_tokens": _FEW_TOKENS, "truncate_prompt_tokens": rng.choice([None, 8, -1])}
    return COMPLETIONS, body


@_hostile
def prediction_of_megabytes(rng: random.Random) -> Made:
    prediction = {"type": "content", "content": text_of(rng, 200_000)}
    return COMPLETIONS, {"prompt": "x", "max_tokens": 2, "prediction": prediction}


@_hostile
def thousands_of_prompts(rng: random.Random) -> Made:
    return COMPLETIONS, {"prompt": ["x"] * rng.choice([300, 4096, 5000]), "max_tokens": 1, "n": rng.choice([1, 16])}


@_hostile
def thousands_of_messages(rng: random.Random) -> Made:
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": "x y"} for index in range(rng.choice([4_000, 60_000]))
    ]
    return rng.choice([(CHAT, {"messages": messages, "max_tokens": 2}), (TOKENIZE, {"messages": messages})])


def fields(rng: random.Random, value: dict[str, Any]) -> Made:
    return COMPLETIONS, {"prompt": "x", "max_tokens": _FEW_TOKENS, **value}


_hostile_each(
    fields,
    {
        "long bad words": {"bad_words": ["w" * 4000] * 500},
        "many bad words": {"bad_words": [f"w{index}" for index in range(20_000)]},
        "long stops": {"stop": ["s" * 100_000] * 4},
        "many stops": {"stop": [f"s{index}" for index in range(50_000)]},
        "many biases": {"logit_bias": {str(index): 1 for index in range(100_000)}},
        "many stop ids": {"stop_token_ids": list(range(100_000))},
        "a million choices": {"n": 10**6},
        "128 choices": {"n": 128, "max_tokens": _FEW_TOKENS},
        "a million log-probs": {"logprobs": 10**6},
    },
)


@_hostile
def tokens_without_end(rng: random.Random) -> Made:
    return DETOKENIZE, {"tokens": [5] * rng.choice([200_000, 600_000])}


@_hostile
def thousands_of_fields(rng: random.Random) -> Made:
    return rng.choice([COMPLETIONS, CHAT, RESPONSES, MESSAGES]), {f"f{index}": index for index in range(50_000)}


def json_of(rng: random.Random, value: bytes) -> Made:
    return rng.choice([COMPLETIONS, CHAT, MESSAGES]), value


_hostile_each(
    json_of,
    {
        "open lists": b"[" * 3_000_000,
        "open objects": b'{"a":' * 500_000,
        "digits": b"1" * 4_000_000,
        "an open text": b'{"prompt":"' + b"\\u0000" * 600_000,
        "no UTF-8": b"\xff" * 999,
        "empty lists": b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}",
        "nested lists": b'{"messages":[' + b"[[[[[[[]]]]]]]," * 260_000 + b"[]]}",
        "empty objects": b'{"messages":[' + b"{}," * 1_300_000 + b"{}]}",
        "numbers": b'{"prompt":[' + b"1," * 1_900_000 + b"1]}",
        "texts": b'{"prompt":["' + b'a","' * 900_000 + b'a"]}',
        "names": b'{"logit_bias":{' + b",".join(b'"%d":1' % index for index in range(380_000)) + b"}}",
    },
)


@_hostile
def beams_without_end(rng: random.Random) -> Made:
    return COMPLETIONS, {"prompt": "x", "max_tokens": 30, "n": 16, "use_beam_search": True, "early_stopping": "never"}


def requests_of(count: int, seed: int) -> Iterator[HostileRequest]:
    """Yield so many requests, every other one valid; the kinds in an order that the seed says.

    A quarter of the hostile ones is drawn by tests/fuzz, and in one burst of four the others are of one kind. One
    client in six leaves before it is answered.
    """
    rng = random.Random(seed)
    num_fuzzed = count // 8
    fuzzed = _fuzzed(num_fuzzed, seed) if num_fuzzed else []
    valid_kinds, hostile_kinds = _in_turn(rng, VALID), _in_turn(rng, HOSTILE)
    for number in range(count):
        if number % BURST == 0:
            repeated = next(hostile_kinds) if rng.random() < 1 / 4 else None
        if number % 2 == 0:
            yield _request(rng, next(valid_kinds), VALID, is_valid=True)
        elif number % 8 == 7 and fuzzed:
            yield fuzzed.pop()
        else:
            yield _request(rng, repeated or next(hostile_kinds), HOSTILE, is_valid=False)


def cheap_requests(count: int, seed: int) -> Iterator[HostileRequest]:
    """Yield so many requests that cost next to nothing, of the same endpoints."""
    rng = random.Random(seed)
    for _ in range(count):
        bodies: list[Made] = [
            (COMPLETIONS, {"prompt": "x", "max_tokens": 2}),
            (CHAT, {"messages": _user("x"), "max_tokens": 2}),
            (RESPONSES, {"input": "x", "max_output_tokens": 2}),
            (MESSAGES, {"messages": _user("x"), "max_tokens": 2}),
            (TOKENIZE, {"prompt": "x"}),
            (DETOKENIZE, {"tokens": [5, 6, 7]}),
            (COUNT_TOKENS, {"messages": _user("x")}),
        ]
        path, body = rng.choice(bodies)
        yield HostileRequest("cheap", path, json.dumps(body).encode(), is_valid=True)


def one_of_each(seed: int) -> Iterator[HostileRequest]:
    """Yield one request of every kind."""
    rng = random.Random(seed)
    for kinds, is_valid in ((VALID, True), (HOSTILE, False)):
        for kind in kinds:
            yield _request(rng, kind, kinds, is_valid=is_valid)


def _in_turn(rng: random.Random, kinds: dict[str, Maker]) -> Iterator[str]:
    """Yield all kinds, shuffled, again and again."""
    names = list(kinds)
    while True:
        rng.shuffle(names)
        yield from names


def _request(rng: random.Random, kind: str, kinds: dict[str, Maker], *, is_valid: bool) -> HostileRequest:
    path, body = kinds[kind](rng)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    patience_s = rng.uniform(0.05, 1.0) if rng.random() < 1 / 6 else 10.0
    return HostileRequest(kind, path, raw, is_valid, patience_s)


def _fuzzed(count: int, seed: int) -> list[HostileRequest]:
    """Draw bodies with changed parts, and structured outputs, by the strategies of tests/fuzz."""
    found: list[HostileRequest] = []
    hints = structured_hints()
    fields = {
        "json": hints["StructuredOutputs.json"],
        "regex": hints["StructuredOutputs.regex"],
        "choice": hints["Choices.texts"],
        "grammar": hints["StructuredOutputs.grammar"],
    }
    names = names_of(["prompt", "messages", "input", "stream", "n", "max_tokens", "tools"])

    def draw_one(data: Any) -> None:
        path = data.draw(st.sampled_from(sorted(VALID_BODIES)))
        body = changed(data.draw, data.draw(st.sampled_from(VALID_BODIES[path])), names)
        found.append(HostileRequest("fuzzed body", path, body, is_valid=False, patience_s=10.0))
        kind = data.draw(st.sampled_from(sorted(fields)))
        asked = {"prompt": "x", "max_tokens": _FEW_TOKENS, "structured_outputs": {kind: data.draw(fields[kind])}}
        raw = json.dumps(asked).encode("utf-8", "replace")
        found.append(HostileRequest("fuzzed output", COMPLETIONS, raw, is_valid=False, patience_s=10.0))

    test = given(st.data())(draw_one)
    test = settings(
        max_examples=count // 2 + 1,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(test)
    hypothesis.seed(seed)(test)()
    return found[:count]
