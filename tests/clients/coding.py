"""Coding agents: how each is started on a task in a folder, and what the scripted model says to it at each turn.

Each reads NOTES, writes ANSWER and runs a command, by calls of its own tools. Where an agent keeps settings, they stand
in a home of its own; what it would tell or ask other hosts is off.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "scripted"
NOTES = "notes.txt"
NOTED = "The secret fruit is the quince."
ANSWER = "answer.txt"
SUM = "sum.txt"
COMMAND = f"cksum {ANSWER} | tee {SUM}"


def written(name: str) -> str:
    """What the agent of this name writes into ANSWER."""
    return f"quinces for {name}\n"


def final(name: str) -> str:
    """What it answers in the end."""
    return f"{name} has written and summed it."


def task(name: str) -> str:
    """The user's message. By it the model finds the script."""
    return f"This is the task of {name}. Read {NOTES}, write {ANSWER} and tell its checksum."


def said(tool: str, **arguments: Any) -> str:
    """A call in the form of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Place:
    """Where an agent works."""

    url: str
    """Of the gateway, without a path."""
    home: Path
    work: Path


@dataclass(frozen=True)
class Coder:
    """A coding agent."""

    name: str
    command: Callable[[Place], list[str]]
    calls: Callable[[Path], list[str]]
    """What the model says at the turns before the last one. It gets the folder of the work."""
    environment: Callable[[Place], dict[str, str]] = lambda place: {}
    files: Callable[[Place], dict[str, Any]] = field(default=lambda place: {})
    """Settings by their path in the home: text, or what is written as JSON."""
    path: str = "/v1/chat/completions"
    """What it asks."""
    last: Callable[[], str] | None = None
    """What the model says at last, where that is a call, too."""

    def script(self, root: Path) -> list[str]:
        """All turns."""
        return [*self.calls(root / self.name / "work"), self.last() if self.last else final(self.name)]


def _heredoc(name: str) -> str:
    return f"cat > {ANSWER} <<'END'\n{written(name)}END"


def _codex(work: Path) -> list[str]:
    patch = f"*** Begin Patch\n*** Add File: {ANSWER}\n+{written('codex')}*** End Patch\n"
    commands = (f"cat {NOTES}", f"apply_patch <<'PATCH'\n{patch}PATCH", COMMAND)
    first, *others = (said("exec_command", cmd=command) for command in commands)
    return [f"I read the notes.\n{first}", *others]


CODEX_SETTINGS = """\
model = "scripted"
model_provider = "outrider"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[otel]
exporter = "none"
[model_providers.outrider]
name = "Outrider"
base_url = "URL/v1"
wire_api = "responses"
"""


def _opencode(name: str) -> Callable[[Path], list[str]]:
    def calls(work: Path) -> list[str]:
        looked = said("glob", pattern="*.txt", path=str(work))
        return [
            f"I look: “{name}” 🍐.\n\n{looked}\n{said('read', filePath=str(work / NOTES))}",  # two at once
            said("write", filePath=str(work / ANSWER), content=written(name)),
            said("bash", command=COMMAND, description="Sums the answer"),
        ]

    return calls


def _opencode_settings(place: Place, package: str = "@ai-sdk/openai-compatible") -> dict[str, Any]:
    return {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "provider": {
            "outrider": {
                "npm": package,
                "name": "Outrider",
                "options": {"baseURL": f"{place.url}/v1", "apiKey": "any"},
                "models": {MODEL: {"name": MODEL, "tool_call": True, "limit": {"context": 300000, "output": 4096}}},
            }
        },
    }


def _opencode_by(protocol: str, package: str, path: str) -> Coder:
    """The same by another protocol, for which it carries a client."""
    name = f"opencode-{protocol}"
    return Coder(
        name,
        lambda place: ["opencode", "run", "--pure", "-m", f"outrider/{MODEL}", task(name)],
        _opencode(name),
        environment=_opencode_environment,
        files=lambda place: {".config/opencode/opencode.json": _opencode_settings(place, package)},
        path=path,
    )


def _pi_by(protocol: str, api: str, path: str, base: str) -> Coder:
    """The same."""
    name = f"pi-{protocol}"
    settings = {**PI_MODELS, "api": api}
    return Coder(
        name,
        lambda place: ["pi", "-p", "--offline", "--provider", "outrider", "--model", MODEL, task(name)],
        lambda work: [
            said("read", path=str(work / NOTES)),
            said("write", path=str(work / ANSWER), content=written(name)),
            said("bash", command=COMMAND, timeout=30),
        ],
        environment=lambda place: {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files=lambda place: {
            ".pi/agent/models.json": {"providers": {"outrider": {"baseUrl": f"{place.url}{base}", **settings}}}
        },
        path=path,
    )


def _opencode_environment(place: Place) -> dict[str, str]:
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    return {f"{brand}_DISABLE_{name}": "true" for name in names for brand in ("OPENCODE", "KILO")} | {
        "KILO_TELEMETRY_LEVEL": "off",
        "OPENCODE_DISABLE_AUTOCOMPACT": "true",
    }


PI_MODELS = {
    "api": "openai-completions",
    "apiKey": "any",
    "models": [{"id": MODEL, "name": MODEL, "contextWindow": 300000, "maxTokens": 4096, "input": ["text"]}],
}
CONTINUE = """\
name: Outrider
version: 1.0.0
schema: v1
models:
  - name: scripted
    provider: openai
    model: scripted
    apiKey: any
    apiBase: URL/v1
    capabilities: [tool_use]
    roles: [chat]
    defaultCompletionOptions: {contextLength: 300000, maxTokens: 4096}
"""
MINI = """\
model:
  model_class: litellm
  model_kwargs: {api_base: URL/v1, api_key: any, drop_params: true, temperature: 0}
  cost_tracking: ignore_errors
"""

CLAUDE_CODE = "claude-code"
"""Of the script of requests that a test itself sends."""


def claude_code(root: Path) -> list[str]:
    """Return its script."""
    work = root / CLAUDE_CODE / "work"
    return [
        f"I read the notes.\n\n{said('Read', file_path=str(work / NOTES))}",
        said("Write", file_path=str(work / ANSWER), content=written(CLAUDE_CODE)),
        said("Bash", command=COMMAND),
        final(CLAUDE_CODE),
    ]


CODERS = [
    Coder(
        "codex",
        lambda place: ["codex", "exec", "--skip-git-repo-check", task("codex")],
        _codex,
        environment=lambda place: {"CODEX_HOME": str(place.home / ".codex")},
        files=lambda place: {".codex/config.toml": CODEX_SETTINGS.replace("URL", place.url)},
        path="/v1/responses",
    ),
    Coder(
        "opencode",
        lambda place: ["opencode", "run", "--pure", "-m", f"outrider/{MODEL}", task("opencode")],
        _opencode("opencode"),
        environment=_opencode_environment,
        files=lambda place: {".config/opencode/opencode.json": _opencode_settings(place)},
    ),
    Coder(
        "kilo",
        lambda place: ["kilo", "run", "--auto", "-m", f"outrider/{MODEL}", task("kilo")],
        _opencode("kilo"),
        environment=_opencode_environment,
        files=lambda place: {".config/kilo/opencode.json": _opencode_settings(place)},
    ),
    Coder(
        "cline",
        lambda place: ["cline", "-P", "openai-compatible", "-k", "any", "-m", MODEL, task("cline")],
        lambda work: [
            said("read_files", files=[{"path": str(work / NOTES)}]),
            said("editor", path=str(work / ANSWER), new_text=written("cline")),
            said("run_commands", commands=[COMMAND]),
        ],
        environment=lambda place: {
            "CLINE_GLOBAL_SETTINGS_PATH": str(place.home / ".cline/data/settings/global-settings.json"),
            "CLINE_NO_AUTO_UPDATE": "1",
            "CLINE_SESSION_BACKEND_MODE": "local",
        },
        files=lambda place: {
            ".cline/data/settings/global-settings.json": {"telemetryOptOut": True, "autoUpdateEnabled": False},
            ".cline/data/settings/providers.json": {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "providers": {
                    "openai-compatible": {
                        "settings": {
                            "provider": "openai-compatible",
                            "model": MODEL,
                            "apiKey": "any",
                            "baseUrl": f"{place.url}/v1",
                        },
                        "updatedAt": "2026-01-01T00:00:00.000Z",
                        "tokenSource": "manual",
                    }
                },
            },
        },
    ),
    Coder(
        "qwen",
        lambda place: ["qwen", "--yolo", "-m", MODEL, task("qwen")],
        lambda work: [
            said("read_file", file_path=str(work / NOTES)),
            said("write_file", file_path=str(work / ANSWER), content=written("qwen")),
            said("run_shell_command", command=COMMAND, is_background=False),
        ],
        environment=lambda place: {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": f"{place.url}/v1"},
        files=lambda place: {
            ".qwen/settings.json": {
                "security": {"auth": {"selectedType": "openai"}},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
            }
        },
    ),
    Coder(
        "pi",
        lambda place: ["pi", "-p", "--offline", "--provider", "outrider", "--model", MODEL, task("pi")],
        lambda work: [
            said("read", path=NOTES),
            said("write", path=ANSWER, content=written("pi")),
            said("bash", command=COMMAND),
        ],
        environment=lambda place: {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files=lambda place: {
            ".pi/agent/models.json": {"providers": {"outrider": {"baseUrl": f"{place.url}/v1", **PI_MODELS}}}
        },
    ),
    _opencode_by("messages", "@ai-sdk/anthropic", "/v1/messages"),
    _opencode_by("responses", "@ai-sdk/openai", "/v1/responses"),
    _pi_by("messages", "anthropic-messages", "/v1/messages", ""),
    _pi_by("responses", "openai-responses", "/v1/responses", "/v1"),
    Coder(
        "cn",
        lambda place: ["cn", "-p", "--auto", "--config", str(place.home / "continue.yaml"), task("cn")],
        lambda work: [
            said("Read", filepath=str(work / NOTES)),
            said("Write", filepath=str(work / ANSWER), content=written("cn")),
            said("Bash", command=COMMAND),
        ],
        environment=lambda place: {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"},
        files=lambda place: {"continue.yaml": CONTINUE.replace("URL", place.url)},
    ),
    Coder(
        "mini",
        lambda place: [
            *("mini", "-y", "--exit-immediately", "-m", f"openai/{MODEL}", "-t", task("mini")),
            *("-c", "mini.yaml", "-c", str(place.home / "outrider.yaml"), "-o", str(place.home / "run.json")),
        ],
        lambda work: [
            said("bash", command=f"cat {NOTES}"),
            said("bash", command=_heredoc("mini")),
            said("bash", command=COMMAND),
        ],
        environment=lambda place: {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": str(place.home / "mini"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files=lambda place: {"outrider.yaml": MINI.replace("URL", place.url)},
        last=lambda: said("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{final('mini')}'"),
    ),
    Coder(
        "grok",
        lambda place: ["grok", "-u", f"{place.url}/v1", "-k", "any", "-m", MODEL, "-p", task("grok")],
        lambda work: [
            said("view_file", path=str(work / NOTES)),
            said("create_file", path=str(work / ANSWER), content=written("grok")),
            said("bash", command=COMMAND),
        ],
    ),
    Coder(
        "smolagents",
        lambda place: ["python", str(Path(__file__).parent / "smol.py"), f"{place.url}/v1", MODEL, task("smolagents")],
        lambda work: [
            said("read", path=NOTES),
            said("write", path=ANSWER, text=written("smolagents")),
            said("run", command=COMMAND),
        ],
        last=lambda: said("final_answer", answer=final("smolagents")),
    ),
    Coder(
        "gptme",
        lambda place: [
            *("gptme", "--non-interactive", "--tool-format", "tool", "-m", f"local/{MODEL}"),
            *("--tools", "read,save,shell,complete", task("gptme")),
        ],
        lambda work: [
            said("read", path=str(work / NOTES)),
            said("save", path=str(work / ANSWER), content=written("gptme")),
            said("shell", command=COMMAND),
        ],
        environment=lambda place: {
            "OPENAI_API_KEY": "any",
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "GPTME_CHECK_UPDATES": "false",
        },
    ),
]
