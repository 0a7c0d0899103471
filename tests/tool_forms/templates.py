"""Which templates show which family, and where a template is known to differ from what Outrider reads or enforces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.call_families import FAMILIES

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
_PYTHON = "The template prints lists and objects as Python does; that is read, and the grammar writes JSON."
_CHANGES = "It changes a list, which the sandbox of templates refuses, as that of transformers does."
_INDENTED = "The template indents past calls, which the models write on a line; indented ones are read."
_SPACES = "The template writes white space of its own source between past calls; it is read."
_QUOTED = (
    "The template puts every past value in quotes, null too; they are read by the schema, and the grammar quotes "
    "strings alone."
)
_UNQUOTED = "The template writes past strings without quotes, and its prompt asks for quotes: those are read."
KNOWN: Mapping[str, tuple[Sequence[str], str]] = {
    "deepseek": (("history",), "It writes calls where there is no text alone."),
    "json": (("required",), "Two calls follow each other; the grammar writes a comma."),
    "llama3": (("required",), "Two calls follow each other; the grammar writes a semicolon."),
    "openai-gpt-oss-120b": (
        ("required", "strict"),
        "Past calls have their recipient in front of the channel, calls that a model writes behind it: the grammar "
        "writes the latter, both are read.",
    ),
    "Kimi-K2-Instruct": ((), _CHANGES),
    "Kimi-K2-Thinking": ((), _CHANGES),
    "Reka-Edge": (
        ("required",),
        "The template escapes letters beyond ASCII in past calls; that is read, and the grammar writes letters.",
    ),
    "vllm-tool_chat_template_llama4_json": (
        ("required",),
        "Two calls follow each other; the grammar writes a semicolon.",
    ),
    "minja-Qwen-Qwen3-Coder-30B-A3B-Instruct": (("required",), _PYTHON),
    "gguf-qwen3-coder-30b": (("required",), _PYTHON),
    "ByteDance-Seed-OSS": (("required",), _PYTHON),
    "vllm-tool_chat_template_deepseekv3": (("required", "strict"), _SPACES),
    "vllm-tool_chat_template_deepseekv31": (("required", "strict"), _SPACES),
    "vllm-tool_chat_template_functiongemma": (("read", "required", "strict"), _QUOTED),
    "vllm-tool_chat_template_llama4_pythonic": (("read", "required", "strict"), _QUOTED + " A quote within is bare."),
    "vllm-tool_chat_template_gemma3_pythonic": (
        ("read", "required"),
        "The template has no comma between past arguments and writes lists and objects as JSON; its prompt asks for "
        "commas and for Python: that is read.",
    ),
    "vllm-tool_chat_template_llama3.2_pythonic": (("read", "required"), _UNQUOTED),
    "vllm-tool_chat_template_toolace": (("read", "required"), _UNQUOTED),
    "LFM2.5-8B-A1B": (
        ("read", "required"),
        "The template puts past strings in single quotes and leaves a quote, a line break and a backslash inside as "
        "they are, which is no Python. It writes lists and objects as JSON; that is read, and the grammar writes "
        "Python.",
    ),
    "gguf-llama4-latest": (
        ("required", "strict"),
        "The template writes two empty tags of Python in front of past calls; they are skipped, and the grammar "
        "writes none.",
    ),
    "vllm-tool_chat_template_phi4_mini": (
        ("read", "required", "strict", "history"),
        "The template leaves `functools` out of past calls, and the calls out where there is text; its prompt asks "
        "for `functools[...]`: that is read.",
    ),
    "vllm-tool_chat_template_granite": (("required", "strict"), _INDENTED),
    "vllm-tool_chat_template_internlm2_tool": (
        ("required", "strict"),
        "Past calls have `arguments`, the models' own `parameters`: both are read, and the grammar writes the latter.",
    ),
}
"""Checks that a public template does not pass, and why that is right: what its models write is another text."""


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
