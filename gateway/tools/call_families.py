"""How families of models write calls of tools: a row a family. `docs/add-a-tool-family.md` says how one is added.

The family of a model is found by the markers in its chat template, or named by `--tool-call-parser`. A row serves three
times: `reader.py` finds calls by it, with any white space between its words; `tool_grammar.py` makes a grammar of its
texts; and both are proven against what the chat template writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.tools.forms.form import CallForm
from gateway.tools.forms.gemma import Gemma
from gateway.tools.forms.json_arguments import JsonArguments
from gateway.tools.forms.json_object import JsonObject
from gateway.tools.forms.pythonic import Pythonic
from gateway.tools.forms.xml_parameters import XmlParameters

TOOL_NAME = "[a-zA-Z0-9_.:-]{1,128}"
"""Regular expression of a valid tool name. Names of Anthropic's API and of MCP may be longer than OpenAI's 64
characters, so 128 are allowed."""


class CallIds(Enum):
    """Rule for the ids of tool calls that a chat template accepts in the chat's history."""

    ANY = "any"
    SHORT = "short"
    """An id has to be nine letters and digits, as Mistral's templates demand."""
    NUMBERED = "numbered"
    """An id has the tool's name and the number of the call in the chat, `functions.f:0` for example (Kimi K2)."""


@dataclass(frozen=True)
class CallFamily:
    """How a family of models writes the tool calls of an output.

    It writes `opening`, then the calls in `form` with `between` between two of them, then `closing`. A marker is a text
    by which calls are found in an output, the beginning of `opening` as a rule.

    # Hermes: <tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>
    #         opening      form                               closing        marker: <tool_call>
    """

    name: str
    form: CallForm
    opening: str = ""
    between: str = ""
    closing: str = ""
    markers: tuple[str, ...] = ()
    """Texts such as `<tool_call>`, each of which announces calls wherever it stands in an output. A grammar allows only
    the first. Empty = calls are found only at the start of an output."""
    is_bare: bool = False
    """Whether an output that begins with one of `bare_starts` may be calls without a marker. A single call then stands
    without `opening` and `closing`, unless `lists_one` is True."""
    bare_starts: tuple[str, ...] = ("{", "[")
    lists_one: bool = False
    """Whether a single call without a marker, too, stands between `opening` and `closing`. Used only if `is_bare` is
    True."""
    in_template: tuple[tuple[str, ...], ...] = ()
    """Texts by which a chat template is recognised: its source contains all texts of at least one of these tuples."""
    parsers: tuple[str, ...] = ()
    """Other values of `--tool-call-parser` that select this family, besides `name`: vLLM's names."""
    ids: CallIds = CallIds.ANY
    silent: tuple[str, ...] = ()
    """Texts outside calls that are dropped from an output if they occur, such as `<|python_end|>`."""

    @property
    def marker(self) -> str | None:
        """The text that announces calls in a grammar, the first of `markers`. None for a family without markers."""
        if self.markers:
            return self.markers[0]
        return None

    @property
    def texts(self) -> tuple[str, ...]:
        """All fixed texts around the names and arguments of calls. Some of them may be tokens of the vocabulary."""
        return (*self.markers, self.opening, self.between, self.closing, *self.form.texts)

    def shows_in(self, template: str) -> bool:
        """Return whether this chat template is one of the family. `template`: its source."""
        return any(_has_all(template, texts) for texts in self.in_template)


def _has_all(template: str, texts: Sequence[str]) -> bool:
    return all(text in template for text in texts)


def _tagged(
    name: str, tag: str, form: CallForm, *in_template: tuple[str, ...], parsers: tuple[str, ...] = ()
) -> CallFamily:
    """Return a family whose calls stand in tags of their own, each on lines of its own."""
    return CallFamily(
        name,
        form,
        opening=f"<{tag}>\n",
        between=f"\n</{tag}>\n<{tag}>\n",
        closing=f"\n</{tag}>",
        markers=(f"<{tag}>",),
        in_template=in_template or ((f"<{tag}>",),),
        parsers=parsers,
    )


def _listed(
    name: str,
    opening: str,
    closing: str,
    *in_template: tuple[str, ...],
    form: CallForm | None = None,
    between: str = ", ",
    parsers: tuple[str, ...] = (),
    markers: tuple[str, ...] = (),
    ids: CallIds = CallIds.ANY,
) -> CallFamily:
    """Return a family whose calls are a list between `opening`, which ends with a bracket, and `closing`."""
    return CallFamily(
        name,
        form or JsonObject(),
        opening=opening,
        between=between,
        closing=closing,
        markers=markers or (opening.rstrip("[ "),),
        in_template=in_template or ((opening,),),
        parsers=parsers,
        ids=ids,
    )


_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_DSML = "｜DSML｜"

QWEN3_CODER = CallFamily(
    "qwen3_coder",
    XmlParameters("<function=NAME>\n", "<parameter=KEY>", "</parameter>\n", "</function>", has_lines=True),
    opening="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    markers=("<tool_call>", "<function="),  # models often leave the tag out
    in_template=(("<tool_call>", "<function=", "<parameter="),),
    parsers=("qwen3_xml", "qwen35_coder", "nemotron_v3", "step3p5", "mimo"),
)
GLM = CallFamily(
    "glm45",
    XmlParameters("NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    opening="<tool_call>",
    between="\n<tool_call>",
    markers=("<tool_call>",),
    in_template=(("</arg_key>\n<arg_value>",), ("</arg_key>\\n<arg_value>",)),
    parsers=("glm4_moe", "ling3", "poolside_v1"),
)
GLM47 = CallFamily(
    "glm47",
    XmlParameters("NAME", "<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    opening="<tool_call>",
    between="<tool_call>",
    markers=("<tool_call>",),
    in_template=(("<arg_key>", "<arg_value>"),),
)
HY3 = CallFamily(
    "hy_v3",
    XmlParameters(
        "<tool_call:opensource>NAME<tool_sep:opensource>\n",
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
        "</tool_call:opensource>",
    ),
    opening="<tool_calls:opensource>\n",
    between="\n",
    closing="\n</tool_calls:opensource>",
    markers=("<tool_calls:opensource>",),
    in_template=(("<tool_calls{}>", "':opensource'"), ("<tool_calls:opensource>",)),
)
MINIMAX_M2 = CallFamily(
    "minimax_m2",
    XmlParameters('<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>"),
    opening="<minimax:tool_call>\n",
    between="\n",
    closing="\n</minimax:tool_call>",
    markers=("<minimax:tool_call>",),
    in_template=(("minimax:tool_call",),),
)
DEEPSEEK_V32 = CallFamily(
    "deepseek_v32",
    XmlParameters(
        f'<{_DSML}invoke name="NAME">\n',
        f'<{_DSML}parameter name="KEY" string="',
        f"</{_DSML}parameter>\n",
        f"</{_DSML}invoke>",
        has_kinds=True,
    ),
    opening=f"<{_DSML}function_calls>\n",
    between="\n",
    closing=f"\n</{_DSML}function_calls>",
    markers=(f"<{_DSML}function_calls>",),
    in_template=((_DSML, "function_calls"), ("DSML", "function_calls")),
)
DEEPSEEK_V4 = CallFamily(
    "deepseek_v4",
    DEEPSEEK_V32.form,
    opening=f"<{_DSML}tool_calls>\n",
    between="\n",
    closing=f"\n</{_DSML}tool_calls>",
    markers=(f"<{_DSML}tool_calls>",),
    in_template=((_DSML, "tool_calls>"), ("DSML", "}tool_calls")),
)
SEED_OSS = _tagged(
    "seed_oss",
    "seed:tool_call",
    XmlParameters("<function=NAME>\n", "<parameter=KEY>", "</parameter>\n", "</function>"),
    ("seed:tool_call",),
)
STEP3 = CallFamily(
    "step3",
    XmlParameters(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
        '<steptml:parameter name="KEY">',
        "</steptml:parameter>",
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    opening="<｜tool_calls_begin｜>",
    closing="<｜tool_calls_end｜>",
    markers=("<｜tool_calls_begin｜>",),
    in_template=(("steptml:invoke",),),
)
KIMI_K2 = CallFamily(
    "kimi_k2",
    JsonArguments(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        ("<|tool_call_begin|>NAME:INDEX<|tool_call_argument_begin|>",),
    ),
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    markers=("<|tool_calls_section_begin|>",),
    in_template=(("<|tool_calls_section_begin|>",),),
    ids=CallIds.NUMBERED,
)
HARMONY = CallFamily(
    "openai",
    JsonArguments(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "<|call|>",
        (
            "<|channel|>commentary to=functions.NAME <|message|>",
            "<|channel|>analysis to=functions.NAME <|constrain|>json<|message|>",
            "<|channel|>analysis to=functions.NAME <|message|>",
            "to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>",
            "to=functions.NAME<|channel|>commentary json<|message|>",
            "to=functions.NAME<|channel|>commentary<|message|>",
        ),
    ),
    between="<|start|>assistant",
    markers=("<|channel|>commentary to=", "<|channel|>analysis to=", "to=functions."),
    in_template=(("<|channel|>", "<|message|>", "<|call|>"),),
    parsers=("gptoss", "gpt_oss", "harmony"),
)
MISTRAL = _listed(
    "mistral", "[TOOL_CALLS][", "]", ("[TOOL_CALLS]",), form=JsonObject(last=', "id": "INDEX"'), ids=CallIds.SHORT
)
MISTRAL_SPACED = _listed("mistral_spaced", "[TOOL_CALLS] [", "]", form=MISTRAL.form, ids=CallIds.SHORT)
MISTRAL_CALL_ID = CallFamily(
    "mistral_call_id",
    JsonArguments("NAME[CALL_ID]INDEX[ARGS]", index="[a-zA-Z0-9]+"),
    opening="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]",),
    in_template=(("[TOOL_CALLS]", "[CALL_ID]"),),
    ids=CallIds.SHORT,
)
MISTRAL_ARGS = CallFamily(
    "mistral_args",
    JsonArguments("NAME[ARGS]"),
    opening="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]",),
    in_template=(("[TOOL_CALLS]", "[ARGS]"),),
    ids=CallIds.SHORT,
)
DEEPSEEK_V3 = CallFamily(
    "deepseek_v3",
    JsonArguments(f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}"),
    opening=_DEEPSEEK,
    between="\n",
    closing=_DEEPSEEK_END,
    markers=(_DEEPSEEK,),
    in_template=((_DEEPSEEK, "```json"),),
)
DEEPSEEK_V31 = CallFamily(
    "deepseek_v31",
    JsonArguments(f"{_CALL}NAME{_SEP}", _CALL_END),
    opening=_DEEPSEEK,
    closing=_DEEPSEEK_END,
    markers=(_DEEPSEEK,),
    in_template=((_DEEPSEEK,),),
)
FUNCTION_GEMMA = CallFamily(
    "functiongemma",
    Gemma("<escape>"),
    opening="<start_function_call>",
    between="<end_function_call><start_function_call>",
    closing="<end_function_call>",
    markers=("<start_function_call>",),
    in_template=(("<start_function_call>",),),
)
GEMMA4 = CallFamily(
    "gemma4",
    Gemma('<|"|>', is_sorted=True),
    opening="<|tool_call>",
    between="<tool_call|><|tool_call>",
    closing="<tool_call|>",
    markers=("<|tool_call>",),
    in_template=(("<|tool_call>",),),
)
OLMO3 = CallFamily(
    "olmo3",
    Pythonic(),
    opening="<function_calls>",
    between="\n",
    closing="</function_calls>",
    markers=("<function_calls>",),
    in_template=(("<function_calls>",),),
)
LFM2 = _listed(
    "lfm2",
    "<|tool_call_start|>[",
    "]<|tool_call_end|>",
    ("<|tool_call_start|>",),
    ("<|tool_list_start|>",),
    ("List of tools: [", "keep_past_thinking"),
    form=Pythonic(),
)
GEMMA3 = CallFamily(
    "gemma3",
    Pythonic(),
    opening="```tool_code\n",
    between="\n",
    closing="\n```",
    markers=("```tool_code",),
    in_template=(("```tool_code",),),
)
LLAMA4_PYTHONIC = CallFamily(
    "llama4_pythonic",
    Pythonic(),
    opening="[",
    between=", ",
    closing="]",
    markers=("<|python_start|>",),
    silent=("<|python_end|>",),
    is_bare=True,
    bare_starts=("[",),
    lists_one=True,
    in_template=(("[func_name1(param",), ("<|python_start|>",)),
    parsers=("pythonic",),
)
GRANITE = _listed(
    "granite", "<|tool_call|>[", "]", ("<|tool_call|>", "granite"), ("<|tool_call|>", "<|start_of_role|>")
)
GRANITE_20B = CallFamily(
    "granite-20b-fc",
    JsonObject(),
    opening="<function_call> ",
    between="\n<function_call> ",
    markers=("<function_call>",),
    in_template=(("<function_call>",),),
)
PHI4 = _listed(
    "phi4",
    "<|tool_call|>[",
    "]<|/tool_call|>",
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|tool|>", "<|/tool|>"),
)
PHI4_FUNCTOOLS = _listed("phi4_mini_json", "functools[", "]", parsers=("phi4_functools",))
HUNYUAN = _listed("hunyuan_a13b", "<tool_calls>[", "]</tool_calls>", ("<tool_calls>",), parsers=("jamba",))
MINIMAX_M1 = CallFamily(
    "minimax",
    JsonObject(),
    opening="<tool_calls>\n",
    between="\n",
    closing="\n</tool_calls>",
    markers=("<tool_calls>",),
    in_template=(("beginning_of_sentence>", "<tool_calls>"),),
)
NEMOTRON = _listed("nemotron_json", "<TOOLCALL>[", "]</TOOLCALL>", ("<TOOLCALL>",), parsers=("nemotron",))
APERTUS = CallFamily(
    "apertus",
    JsonArguments('{"NAME": ', "}", ('{ "NAME" : ',)),
    opening="<|tools_prefix|>[",
    between=", ",
    closing="]",
    markers=("<|tools_prefix|>",),
    silent=("<|tools_suffix|>",),  # the token may end the output, and is then no part of its text
    in_template=(("<|tools_prefix|>",),),
)
COHERE = _listed(
    "cohere_command",
    "<|START_ACTION|>[\n    ",
    "\n]<|END_ACTION|>",
    ("<|START_ACTION|>",),
    form=JsonObject("parameters", "tool_name", '"tool_call_id": "INDEX", '),
    between=",\n    ",
    parsers=("cohere", "cohere_command3", "cohere_command4"),
    markers=("<|START_ACTION|>",),
)
INTERNLM = CallFamily(
    "internlm",
    JsonObject("parameters"),
    opening="<|action_start|><|plugin|>\n",
    between="<|action_end|><|action_start|><|plugin|>\n",
    closing="<|action_end|>",
    markers=("<|action_start|>",),
    in_template=(("<|action_start|>", "<|plugin|>"),),
)
LONGCAT = _tagged("longcat", "longcat_tool_call", JsonObject())
PANGU = _listed("pangu", "[unused11][", "][unused12]", ("[unused11]",))
HERMES = _tagged(
    "hermes", "tool_call", JsonObject(), parsers=("qwen2_5", "ernie45", "smollm3", "granite4", "qwen3", "qwen3_json")
)
LLAMA3 = CallFamily(
    "llama3_json",
    JsonObject("parameters", is_exact=False),
    between="; ",
    markers=("<|python_tag|>",),
    is_bare=True,
    bare_starts=("{", "["),
    in_template=(("<|python_tag|>",), ('"parameters": ', "<|start_header_id|>")),
)
LLAMA4_JSON = CallFamily(
    "llama4_json",
    LLAMA3.form,
    between="; ",
    is_bare=True,
    silent=("<|python_start|>", "<|python_end|>"),
    in_template=(('"parameters": ', "<|header_start|>"),),
)
JSON = CallFamily(
    "json",
    JsonObject(is_exact=False),
    opening="[",
    between=", ",
    closing="]",
    is_bare=True,
    parsers=("xlam",),
)
"""The family of a template that takes tools and shows no tags of calls. Calls are JSON with the keys `name` and
`arguments`, without a marker."""

FAMILIES: Sequence[CallFamily] = (
    HARMONY,
    KIMI_K2,
    GLM,
    GLM47,
    HY3,
    QWEN3_CODER,
    SEED_OSS,
    MINIMAX_M2,
    STEP3,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    MISTRAL_CALL_ID,
    MISTRAL_ARGS,
    MISTRAL_SPACED,
    MISTRAL,
    FUNCTION_GEMMA,
    GEMMA4,
    LFM2,
    OLMO3,
    GEMMA3,
    LLAMA4_JSON,
    LLAMA4_PYTHONIC,
    PHI4,
    PHI4_FUNCTOOLS,
    GRANITE,
    GRANITE_20B,
    MINIMAX_M1,
    HUNYUAN,
    NEMOTRON,
    APERTUS,
    COHERE,
    INTERNLM,
    LONGCAT,
    PANGU,
    HERMES,
    LLAMA3,
    JSON,
)
"""All families of calls. A chat template belongs to the first one whose texts (`in_template`) it contains. A family
whose texts include those of another stands in front of it."""
BY_PARSER: Mapping[str, CallFamily] = {name: family for family in FAMILIES for name in (family.name, *family.parsers)}
"""Family of calls by the value of `--tool-call-parser` that selects it."""
_UNKNOWN = re.compile(r"<[^<>\s{}]*(?:tool_?calls?|function_?calls?|invoke|action)(?:\{\})?[^<>\s{}]*>", re.IGNORECASE)
"""A tag of calls."""
_OTHER_FORMS: Mapping[str, tuple[str, ...]] = {
    "]<]minimax[>[<tool_call>": ("]<]minimax[>[", "<invoke name="),
    "<function=NAME>": ("start_tag", "{end_tag}", "</function>"),
    '<function name="NAME">': ('<function name="', '<param name="'),
    ">>>NAME": (">>>all", ">>>"),
    "Action: ```json": ("Action:\\n```json",),
    "function call<|role_sep|>": ("<|role_sep|>", "function call'"),
    "<|open|>tools": ("open_tag('tools')",),
}
"""Forms that no family has, and the texts by which a template shows each, which shows a family's texts as well."""


class UnknownFamily(Exception):
    """Raised if a chat template writes calls in a form that no family has. The argument is the tag that it writes."""


def family_of(template: str) -> CallFamily:
    """Return how models with this chat template write tool calls. Raises UnknownFamily if no family has their form.

    `template`: the source of a template that takes tools.
    """
    for tag, texts in _OTHER_FORMS.items():
        if _has_all(template, texts):
            raise UnknownFamily(tag)
    for family in FAMILIES:
        if family.shows_in(template):
            return family
    unknown = _UNKNOWN.search(template)
    if unknown is not None:
        raise UnknownFamily(unknown[0])
    return JSON
