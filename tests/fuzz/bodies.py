"""HTTP bodies that nobody should send: what real clients sent, with parts of it replaced, dropped, moved and added."""

import copy
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.values import Draw, mutated
from tests.service.test_http_tools import CALLS
from tests.service.test_recorded_requests import RECORDED
from tests.service.test_responses_writer import REASONED

PLAYED = (
    ("demo", "the quick brown fox"),
    ("demo", "é😀" * 20),
    ("demo", CALLS),
    ("demo", '<tool_call>\n{"name": "Weather", "arguments": {"city": Rome}}\n</tool_call> sorry'),
    ("reasoning", REASONED),
)
"""(template, answer)"""
_CHAT = [{"role": "user", "content": "x"}]
_OTHERS = [
    (
        "/v1/completions",
        {"prompt": ["x", "y"], "best_of": 3, "n": 2, "priority": -3, "max_tpot_ms": 50.0, "logprobs": 1},
    ),
    ("/v1/completions", {"prompt": "a b c", "echo": True, "logprobs": 2, "max_tokens": 0, "truncate_prompt_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "stream": True, "echo": True, "return_token_ids": True, "stop": "quick"}),
    ("/v1/chat/completions", {"messages": _CHAT, "prompt_logprobs": 1, "return_token_ids": True, "logprobs": True}),
    ("/v1/chat/completions", {"messages": _CHAT, "stream": True, "speculation": {"explain": True}, "n": 2}),
    ("/tokenize", {"messages": _CHAT, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]
_ASKED = [(each["path"], each["body"]) for requests in RECORDED.values() for each in requests if each["status"] == 200]
VALID: dict[str, list[str]] = {}
"""By path: bodies that are answered."""
for _path, _body in [*_ASKED, *_OTHERS]:
    VALID.setdefault(_path, []).append(json.dumps(_body))

_LARGE = re.compile(r'"<(list|object|chat) (\d+)>"')
"""Stands for a value of such depth, which Python itself would not write, or a chat of so many messages."""
_TEXTS = st.sampled_from(
    ["", "x", "\0", "é😀" * 200, "a" * 5000, "\ud800", "<|im_end|>", "0", "[DONE]", "\n\ndata: {}"]
)
_NUMBERS = st.sampled_from(
    (
        *(0, 1, -1, 2, 3, 16, 17, 20, 21, 128, 129, 2047, 2048, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 2**64),
        *(10**400, -(2**63) - 1, 0.0, -0.0, 0.5, 1.0, 1.5, 2.5, 1e308, 5e-324, math.nan, math.inf),
    )
)
_DEPTHS = [f"<{kind} {depth}>" for kind in ("list", "object") for depth in (30, 130, 260, 900, 1030, 50_000)]
_PLAIN = st.one_of(st.sampled_from([None, True, False, [], {}, [[]]]), _TEXTS, _NUMBERS, st.text(max_size=6))
_VALUE = st.one_of(
    _PLAIN,
    _PLAIN,
    st.sampled_from(_DEPTHS),
    st.lists(_PLAIN, max_size=3),
    st.dictionaries(st.sampled_from(["type", "text", "name", "a", ""]), _PLAIN, max_size=3),
    st.sampled_from([["x"] * 5000, [5] * 5000, "<chat 5000>", {str(at): at for at in range(2000)}]),
)
_FEW = st.sampled_from([None, 0, 1, 2, 3, 16, 20, 21, 128, 129, -1, -2, 2047, 2048, 2**31])
_FLAG = st.sampled_from([None, True, False])
_SCHEMA = st.sampled_from(
    (
        *({}, True, False, None, 5, "{}", {"type": "object"}, {"type": "string", "pattern": "("}, {"enum": []}),
        *({"type": "array", "items": {"$ref": "#"}}, {"type": "object", "properties": {"a": {"const": 10**30}}}),
        *({"type": "object", "default": f"<object {depth}>"} for depth in (30, 240, 260)),
    )
)
"""The rest of what an answer may have to be has a campaign of its own."""
_CALLED = ["", "{}", "[]", "{", '{"a": 1}', '{"a":' * 260 + "1" + "}" * 260, '{"a":' * 900 + "1" + "}" * 900]
_FITTING: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("max_tokens", "max_output_tokens", "max_completion_tokens", "min_tokens", "n", "best_of"), _FEW),
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens", "priority", "seed"), _FEW
    ),
    **dict.fromkeys(("stream", "echo", "return_token_ids", "include_stop_str_in_output", "skip_special_tokens"), _FLAG),
    **dict.fromkeys(
        ("add_special_tokens", "return_token_strs", "add_generation_prompt", "ignore_eos", "strict"), _FLAG
    ),
    **dict.fromkeys(("use_beam_search", "parallel_tool_calls", "include_usage", "continuous_usage_stats"), _FLAG),
    **dict.fromkeys(("schema", "parameters", "input_schema", "json"), _SCHEMA),
    **dict.fromkeys(("stop", "stop_sequences", "suffix", "instructions", "system", "description"), _TEXTS | _VALUE),
    "logprobs": _FEW | _FLAG,
    "regex": st.sampled_from(["a+", "(", "", "a{1,9999}", "\\p{L}"]),
    "grammar": st.sampled_from(["start: /a/", "root ::= root", "start: start", "%", ""]),
    "choice": st.sampled_from([["a", "b"], [], [""], ["a"] * 1025]),
    "max_tpot_ms": st.sampled_from([0.001, 50, 3.6e6, 3.7e6, 0, -1, 1e308]),
    "prompt": st.sampled_from(["", "x", ["x", "y"], [5, 6], [[5], [6, 7]], [4096], [-1], [2**40], [[]], ["x"] * 200]),
    "tokens": st.sampled_from(
        [[], [5], [0], [4095], [4096], [-1], [2**32], [2**70], [5] * 20_000, ["5"], [1.0], [True]]
    ),
    "arguments": st.sampled_from(_CALLED),
    "include": st.sampled_from([["message.output_text.logprobs"], [], ["x"]]),
    "role": st.sampled_from(["user", "system", "developer", "assistant", "tool", "wizard"]),
    "type": st.sampled_from(
        (
            *("text", "message", "reasoning", "function", "function_call", "function_call_output", "tool_use", "tool"),
            *("thinking", "redacted_thinking", "tool_result", "input_text", "json_schema", "json_object"),
            *("auto", "any", "enabled"),
        )
    ),
    "tool_choice": st.sampled_from(
        (
            *("none", "auto", "required", {"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}),
            *({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        )
    ),
    "content": st.sampled_from(["", None, [], [{"type": "text", "text": "x"}], [{"type": "input_text", "text": "x"}]]),
    "input": st.sampled_from(["", "x", [], {}, _CHAT, "<chat 100>", [{"type": "reasoning", "summary": []}]]),
    "messages": st.sampled_from([[], _CHAT, "<chat 100>", [*_CHAT, {"role": "assistant", "content": "y"}]]),
    "stream_options": st.fixed_dictionaries({"include_usage": _FLAG, "continuous_usage_stats": _FLAG}),
    "structured_outputs": st.sampled_from(
        [{"regex": "a+"}, {"choice": ["a"]}, {"json_object": True}, {}, {"json": {}}]
    ),
    "text": _TEXTS | st.sampled_from([{"format": {"type": "json_object"}}, {"format": {"type": "json_schema"}}, {}]),
    "speculation": st.sampled_from(
        (
            *({"explain": True}, {"token_kinds": True}, {"tree": "2x1"}, {"drafter": "prediction"}, {"lenience": 0.5}),
            *({"metrics": "detailed"}, {"num_draft_tokens": 0}, {"draft_logprobs": "topk:9"}),
        )
    ),
}
"""By a field's name: values near its bounds."""
_WHAT = st.sampled_from(["set", "set", "drop", "move", "double", "wrap", "add", "add", "add"])
_MIXED = {name: st.one_of(fitting, fitting, _VALUE) for name, fitting in _FITTING.items()}


def names_of(known: list[str]) -> st.SearchStrategy[str]:
    """Draw names of fields: those that an endpoint knows, and others."""
    return st.one_of(st.sampled_from(known), st.sampled_from(sorted(_FITTING)), st.text(max_size=3))


def changed(draw: Draw, valid: str, names: st.SearchStrategy[str]) -> bytes:
    """Return this body with a few of its parts changed. names: of fields that are added."""
    top = [json.loads(valid)]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        _change(draw, top, names)
    text = json.dumps(top[0], ensure_ascii=draw(st.booleans())) if top else ""
    raw = _LARGE.sub(_large, text).encode("utf-8", "surrogatepass")
    return mutated(draw, raw) if draw(st.integers(0, 9)) == 0 else raw


def _change(draw: Draw, top: list[Any], names: st.SearchStrategy[str]) -> None:
    places = list(_places(top))
    if not places:
        return
    holder, key = places[draw(st.integers(0, len(places) - 1))]
    what = draw(_WHAT)
    if what == "set":
        holder[key] = copy.deepcopy(draw(_MIXED.get(key, _VALUE)))  # one that is sampled would be changed for good
    elif what == "drop":
        del holder[key]
    elif what == "move":
        other, place = places[draw(st.integers(0, len(places) - 1))]
        holder[key] = copy.deepcopy(other[place])
    elif what == "double" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif what == "wrap":
        holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}]))
    else:
        where = holder[key] if isinstance(holder[key], dict) else top[0]
        if isinstance(where, dict):
            name = draw(names)
            where[name] = copy.deepcopy(draw(_MIXED.get(name, _VALUE)))


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value, those of long lists but the first ones left out."""
    keys = list(holder) if isinstance(holder, dict) else range(min(len(holder), 20))
    for key in keys:
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


def _large(found: re.Match[str]) -> str:
    kind, count = found[1], int(found[2])
    if kind == "chat":
        return json.dumps(_CHAT * count)
    opens, within, closes = ("[", "", "]") if kind == "list" else ('{"a":', "1", "}")
    return opens * count + within + closes * count
