"""Makes a command-line option of `outrider up` from each setting of gateway and workers. For `up.py`.

The option of a gateway's setting has the setting's name (--max-queue). The option of a worker's setting has the role
before it (--target-max-slots).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig
from outrider.wire.settings.pools import Values

_OF_UP = {
    "gateway": frozenset({"host", "port", "grpc_port", "num_draft_tokens", "drafter", "tree", "model_name", "tls_dir"}),
    "target": frozenset({"model", "device", "cpu_cores", "tls_dir"}),
    "draft": frozenset({"model", "device", "cpu_cores", "tls_dir", "drafter", "drafter_text", "target_model"}),
}
"""Settings, by part, for which no option is made: `outrider up` has its own options for them, or sets them itself."""
_WHERE = frozenset({"target", "draft", "target_for_draft", "registry"})
"""Names of the gateway's settings that are set from the workers' addresses."""
_PARTS: dict[str, type[BaseSettings]] = {"gateway": GatewayConfig, "target": TargetConfig, "draft": DraftConfig}
_GATEWAYS = "Settings of the gateway"


@dataclass(frozen=True, slots=True)
class _Setting:
    part: str
    name: str
    info: FieldInfo

    @property
    def argument(self) -> str:
        """Name of the command's parameter for this setting."""
        return f"{self.part}_{self.name}"

    @property
    def option(self) -> Any:
        """Annotation of the command's parameter for this setting, from which typer makes the option."""
        flag = self.name.replace("_", "-")
        panel: dict[str, Any] = {"rich_help_panel": _GATEWAYS}
        if self.part != "gateway":
            flag = f"{self.part}-{flag}"
            panel = {"hidden": True}
        if self.info.annotation is bool:
            switch: Any = typer.Option(f"--{flag}/--no-{flag}", help=self.info.description, show_default=False, **panel)
            return Annotated[bool | None, switch]
        option: Any = typer.Option(f"--{flag}", help=self.info.description, show_default=False, **panel)
        return Annotated[str | None, option]


def _settings() -> Iterator[_Setting]:
    for part, config in _PARTS.items():
        for name, info in config.model_fields.items():
            if name not in _OF_UP[part] and not (part == "gateway" and name in _WHERE):
                yield _Setting(part, name, info)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a command with a parameter `settings`: typer gets one option per setting in place of that parameter.

    The command is called with the options' values as `settings`, by part ("gateway", "target", "draft") and setting
    name; None = the option was not given.
    """
    options = {setting.argument: setting for setting in _settings()}
    before = inspect.signature(command).parameters
    parameters = [parameter for name, parameter in before.items() if name != "settings"]
    for argument, setting in options.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(argument, kind, default=None, annotation=setting.option))

    def run(**given: Any) -> None:
        settings: dict[str, Values] = {part: {} for part in _PARTS}
        for argument, setting in options.items():
            settings[setting.part][setting.name] = given.pop(argument)
        command(settings=settings, **given)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
