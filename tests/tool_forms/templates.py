"""Which templates show which family, and where a template is known to differ from what Outrider reads or enforces."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.call_families import FAMILIES
from tests.tool_forms.chats import ANSWERS

OWN = Path(__file__).parents[1] / "data/templates"
"""The repository's templates, each named after its family."""
_OWN_NAMES = {
    "deepseek_v3": "deepseek",
    "llama3_json": "llama3",
    "mistral": "mistral_list",
    "mistral_spaced": "mistral",
}
PUBLIC: Mapping[str, Sequence[str]] = {
    "openai": ("openai-gpt-oss-120b",),
    "kimi_k2": ("moonshotai-Kimi-K2", "Kimi-K2-Instruct", "Kimi-K2-Thinking"),
    "glm45": ("GLM-4.6", "inclusionai-ling-3.0-flash", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    "glm47": ("GLM-4.7-Flash", "Spark2.5", "poolside-Laguna-S-2.1"),
    "hy_v3": ("tencent-Hy3",),
    "qwen3_coder": (
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "StepFun3.5-Flash",
        "minja-Qwen-Qwen3-Coder-30B-A3B-Instruct",
        "gguf-qwen3-coder-30b",
    ),
    "seed_oss": ("ByteDance-Seed-OSS",),
    "minimax_m2": ("MiniMax-M2",),
    "deepseek_v4": ("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    "deepseek_v32": ("deepseek-ai-DeepSeek-V3.2",),
    "deepseek_v3": ("vllm-tool_chat_template_deepseekr1", "vllm-tool_chat_template_deepseekv3"),
    "deepseek_v31": ("vllm-tool_chat_template_deepseekv31",),
    "mistral_call_id": ("Mistral-Small-3.2-24B-Instruct-2506",),
    "mistral_args": ("mistralai-Ministral-3-14B-Reasoning-2512", "unsloth-mistral-Devstral-Small-2507"),
    "mistral_spaced": (
        "vllm-tool_chat_template_mistral",
        "vllm-tool_chat_template_mistral3",
        "vllm-tool_chat_template_mistral_parallel",
    ),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407",),
    "functiongemma": ("vllm-tool_chat_template_functiongemma",),
    "gemma4": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "vllm-tool_chat_template_gemma4"),
    "lfm2": ("LFM2.5-8B-A1B", "LFM2.5-Instruct", "LFM2-8B-A1B"),
    "llama4_json": ("vllm-tool_chat_template_llama4_json", "gguf-llama4-latest"),
    "llama4_pythonic": (
        "vllm-tool_chat_template_llama4_pythonic",
        "vllm-tool_chat_template_gemma3_pythonic",
        "vllm-tool_chat_template_llama3.2_pythonic",
        "vllm-tool_chat_template_toolace",
    ),
    "phi4": ("gguf-phi4-mini-3.8b", "gguf-phi4-mini-reasoning-3.8b"),
    "phi4_mini_json": ("vllm-tool_chat_template_phi4_mini",),
    "granite": ("vllm-tool_chat_template_granite", "ibm-granite-granite-3.3-2B-Instruct"),
    "granite-20b-fc": ("vllm-tool_chat_template_granite_20b_fc",),
    "minimax": ("MiniMax-M1",),
    "hunyuan_a13b": ("vllm-tool_chat_template_hunyuan_a13b", "Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"),
    "nemotron_json": ("NVIDIA-Nemotron-Nano-v2",),
    "apertus": ("Apertus-8B-Instruct", "vllm-tool_chat_template_apertus"),
    "cohere_command": ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Cohere2MoE"),
    "internlm": ("vllm-tool_chat_template_internlm2_tool",),
    "hermes": (
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Qwen-QwQ-32B",
        "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
        "Bielik-11B-v3.0-Instruct",
        "MiMo-VL",
        "Reka-Edge",
        "vllm-tool_chat_template_hermes",
        "HuggingFaceTB-SmolLM3-3B-tools",
    ),
    "llama3_json": (
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "vllm-tool_chat_template_llama3.1_json",
        "vllm-tool_chat_template_llama3.2_json",
    ),
    "json": ("vllm-tool_chat_template_xlam_llama", "vllm-tool_chat_template_xlam_qwen"),
}
"""Names of public templates by their family, the one that tells most first."""
RECOGNISED: Mapping[str, Sequence[str]] = {
    "hermes": (
        "gguf-cogito-14b",
        "gguf-qwen2.5-0.5b",
        "gguf-qwen3-next-80b",
        "gguf-qwq-32b",
        "gguf-qwq-32b-2",
        "gguf-rnj-1-latest",
        "oldest-Qwen-QwQ-32B",
        "plain-qwen2.5-instruct",
        "vllm-template_minicpmv45",
    ),
    "json": ("gguf-glm4-9b", "gguf-nemotron-mini-4b"),
    "granite": (
        "gguf-granite3-dense-2b",
        "gguf-granite3.1-moe-1b",
        "gguf-granite3.2-8b",
        "gguf-granite3.2-vision-2b",
        "gguf-granite3.3-2b",
        "plain-granite-3.0-instruct",
    ),
    "llama3_json": ("gguf-llama3.2-vision-latest",),
    "deepseek_v3": ("llama-cpp-deepseek-r1", "oldest-llama-cpp-deepseek-r1"),
    "gemma4": (
        "older-google-gemma-4-31B-it",
        "older-google-gemma-4-31B-it-interleaved",
        "patches-12B-it",
        "patches-E2B-it",
        "patches-W9VxRw09-no_information9314-gemma4-enable_thinking",
        "patches-aldehir-de036c259-gemma4-open-webui",
        "patches-asf0-gemma4_jinja-chat_template",
        "patches-hnPGq0ht-sadman782-gemma4-alt-template",
        "patches-tBAHN6FV-sigjhl-gemma4-jsonschema-robustness",
    ),
    "cohere_command": ("oldest-CohereForAI-c4ai-command-r7b-12-2024-tool_use",),
    "qwen3_coder": (
        "patches-0.8B",
        "patches-35B-A3B",
        "patches-35B-A3B-2",
        "patches-4wZPFui9-substantial_swan_144-qwen35-no_thinking",
        "patches-allanchan339-vllm-qwen35-enhanced",
        "patches-allanchan339-vllm-qwen36-enhanced",
        "patches-fakezeta-9e8e039c-qwen36-merged",
        "patches-froggeric-Qwen-Fixed-Chat-Templates-qwen35",
        "patches-froggeric-Qwen-Fixed-Chat-Templates-qwen36-2179960",
        "patches-froggeric-Qwen-Fixed-Chat-Templates-qwen36-e1eb965",
        "patches-froggeric-Qwen-Fixed-Chat-Templates-v18",
        "patches-froggeric-Qwen-Fixed-Chat-Templates-v20",
        "patches-froggeric-Qwen-Fixed-Chat-Templates-v21.3",
        "patches-jscott3201-e4b15588-qwen36-custom",
        "patches-lekoOwO-c6aed944-qwen35-fork",
        "patches-sudoingX-c2facf7d-qwen35-27b-fixed",
        "vllm-tool_chat_template_qwen3coder",
    ),
    "glm45": ("vllm-tool_chat_template_glm4",),
}
"""Names of further public templates by the family that they show: recognition is all that is tried."""
TOOLLESS: Mapping[str, Sequence[str]] = {
    "deepseek_v3": (
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "gguf-deepseek-r1-8b",
        "gguf-deepseek-r1-latest",
        "gguf-deepseek-v2.5-236b",
        "gguf-deepseek-v3-671b",
        "gguf-r1-1776-671b",
        "oldest-deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    ),
    "deepseek_v31": ("deepseek-ai-DeepSeek-V3.1", "oldest-deepseek-ai-DeepSeek-V3.1"),
    "phi4_mini_json": ("fireworks-ai-llama-3-firefunction-v2", "oldest-fireworks-ai-llama-3-firefunction-v2"),
}
"""Names of public templates that take no tools, by the family whose calls are in their text."""
UNREAD = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "GigaChat3.5",
    "Kimi-K3",
    "MiniMax-M3",
    "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2",
    "muse-glimmer",
    "openbmb-MiniCPM5-1B",
    "upstage-Solar-Open-100B",
)
"""Public templates that write calls in a form of no family: it has to be said."""
_ALL = tuple(ANSWERS)
_WITHOUT_TEXT = tuple(name for name in ANSWERS if name != "text before")
_NO_CALLS = "The template writes no past calls."
_PYTHON = "The template prints lists and objects as Python does; that is read, and the grammar writes JSON."
_CHANGES = "It changes a list, which the sandbox of templates refuses, as that of transformers does."
_INDENTED = "The template indents past calls, which the models write on a line; indented ones are read."
_SPACES = "The template writes white space of its own source between past calls; it is read."
_QUOTED = (
    "The template puts every past value in quotes, null too; they are read by the schema, and the grammar quotes "
    "strings alone."
)
_UNQUOTED = "The template writes past strings without quotes, and its prompt asks for quotes: those are read."


@dataclass(frozen=True)
class Difference:
    """Checks that a template does not pass with some answers."""

    names: tuple[str, ...]
    answers: Mapping[str, Sequence[str]]
    """Names of answers in `chats.ANSWERS`, by the check."""
    why: str


KNOWN: Sequence[Difference] = (
    Difference(
        (
            "openai-gpt-oss-120b",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "vllm-tool_chat_template_llama3.1_json",
            "vllm-tool_chat_template_llama3.2_json",
        ),
        {"written": ("two calls",)},
        "The template takes one call a message: past ones are given to it in a message each.",
    ),
    Difference(
        (
            "vllm-tool_chat_template_llama4_json",
            "gguf-llama4-latest",
            "vllm-tool_chat_template_llama4_pythonic",
            "vllm-tool_chat_template_gemma3_pythonic",
        ),
        {"read": ("text before",)},
        "Calls without a mark are read at the start of an answer alone. The prompt asks for calls alone.",
    ),
    Difference(
        ("openai-gpt-oss-120b",),
        {
            "required": ("one call", "no arguments", "each type", "letters", "quotes", "lines", "tags", "nested"),
            "strict": ("one call",),
        },
        "Past calls have their recipient in front of the channel, calls that a model writes behind it: the "
        "grammar writes the latter, both are read.",
    ),
    Difference(
        ("Kimi-K2-Instruct", "Kimi-K2-Thinking"),
        {"written": _ALL},
        _CHANGES,
    ),
    Difference(
        ("minja-Qwen-Qwen3-Coder-30B-A3B-Instruct",),
        {"required": ("each type", "letters", "quotes")},
        _PYTHON,
    ),
    Difference(
        ("gguf-qwen3-coder-30b", "ByteDance-Seed-OSS"),
        {"required": ("each type", "letters", "quotes", "nested")},
        _PYTHON,
    ),
    Difference(
        ("vllm-tool_chat_template_deepseekv3", "vllm-tool_chat_template_deepseekv31"),
        {"required": _WITHOUT_TEXT, "strict": ("one call",)},
        _SPACES,
    ),
    Difference(
        ("vllm-tool_chat_template_functiongemma",),
        {
            "read": ("each type",),
            "required": ("one call", "two calls", "each type", "letters", "quotes", "nested"),
            "strict": ("one call",),
        },
        _QUOTED,
    ),
    Difference(
        ("LFM2.5-8B-A1B",),
        {
            "read": ("quotes", "lines"),
            "required": ("quotes", "lines", "nested"),
        },
        "The template puts past strings in single quotes and leaves a quote, a line break and a backslash inside "
        "as they are, which is no Python. It writes lists and objects as JSON; that is read, and the grammar "
        "writes Python.",
    ),
    Difference(
        (
            "LFM2.5-Instruct",
            "LFM2-8B-A1B",
            "gguf-phi4-mini-3.8b",
            "gguf-phi4-mini-reasoning-3.8b",
            "ibm-granite-granite-3.3-2B-Instruct",
            "HuggingFaceTB-SmolLM3-3B-tools",
        ),
        {"written": _ALL},
        _NO_CALLS,
    ),
    Difference(
        ("vllm-tool_chat_template_llama4_json",),
        {"required": ("two calls",)},
        "Two calls follow each other; the grammar writes a semicolon.",
    ),
    Difference(
        ("gguf-llama4-latest",),
        {"required": _WITHOUT_TEXT, "strict": ("one call",)},
        "The template writes two empty tags of Python in front of past calls; they are skipped, and the grammar "
        "writes none.",
    ),
    Difference(
        ("vllm-tool_chat_template_llama4_pythonic",),
        {
            "read": ("each type", "quotes", "lines"),
            "required": ("one call", "two calls", "each type", "letters", "quotes", "lines", "nested"),
            "strict": ("one call",),
        },
        _QUOTED + " A quote within is bare.",
    ),
    Difference(
        ("vllm-tool_chat_template_gemma3_pythonic",),
        {
            "read": ("each type", "letters", "quotes", "lines"),
            "required": ("each type", "letters", "quotes", "lines", "nested"),
        },
        "The template has no comma between past arguments and writes lists and objects as JSON; its prompt asks "
        "for commas and for Python: that is read.",
    ),
    Difference(
        ("vllm-tool_chat_template_llama3.2_pythonic", "vllm-tool_chat_template_toolace"),
        {
            "read": ("two calls", "text before", "each type", "letters", "quotes", "lines", "tags"),
            "required": ("two calls", "each type", "letters", "quotes", "lines", "tags"),
        },
        _UNQUOTED,
    ),
    Difference(
        ("vllm-tool_chat_template_phi4_mini",),
        {"read": _WITHOUT_TEXT, "written": ("text before",), "history": ("text before",), "required": _WITHOUT_TEXT},
        "This public template shows no history that could be read: it leaves `functools` out of past calls, and "
        "the calls out where there is text. Its prompt asks for `functools[...]`: that is read, as the "
        "repository's own template shows.",
    ),
    Difference(("vllm-tool_chat_template_granite",), {"required": _WITHOUT_TEXT, "strict": ("one call",)}, _INDENTED),
    Difference(
        ("vllm-tool_chat_template_internlm2_tool",),
        {"required": _WITHOUT_TEXT, "strict": ("one call",)},
        "Past calls have `arguments`, the models' own `parameters`: both are read, and the grammar writes the latter.",
    ),
    Difference(
        ("Reka-Edge",),
        {"required": ("letters",)},
        "The template escapes letters beyond ASCII in past calls; that is read, and the grammar writes letters.",
    ),
)
"""Why a public template does not pass a check, and why that is right: what its models write is another text."""


@dataclass(frozen=True)
class TemplateFile:
    """A chat template of a family."""

    name: str
    family: str
    source: str
    origin: str
    """Where it comes from: repository and path."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()


def own_templates() -> list[TemplateFile]:
    """Return the repository's template of each family."""
    found = []
    for family in FAMILIES:
        name = _OWN_NAMES.get(family.name, family.name)
        source = (OWN / f"{name}.jinja").read_text(encoding="utf-8")
        found.append(TemplateFile(name, family.name, source, f"tests/data/templates/{name}.jinja"))
    return found


def public_templates(folder: Path) -> list[TemplateFile]:
    """Return the templates of PUBLIC that lie in a folder, whose `sources.json` says where each comes from."""
    sources = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
    found = []
    for family, names in PUBLIC.items():
        for name in names:
            path = folder / f"{name}.jinja"
            if path.exists():
                origin = f"{sources[name]['repository']} {sources[name]['path']}"
                found.append(TemplateFile(name, family, path.read_text(encoding="utf-8"), origin))
    return found
