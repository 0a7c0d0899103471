"""An option of `outrider up` for each setting of its parts, made of the settings themselves.

The gateway's have their own names (--max-queue), the workers' the role before them (--target-max-slots).
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
"""Settings that `outrider up` has options of its own for, or fills in."""
_WHERE = frozenset({"target", "draft", "target_for_draft", "registry"})
"""Settings of the gateway that follow from where the workers run."""
_PARTS: dict[str, type[BaseSettings]] = {"gateway": GatewayConfig, "target": TargetConfig, "draft": DraftConfig}
_GATEWAYS = "Settings of the gateway"


@dataclass(frozen=True, slots=True)
class _Setting:
    part: str
    name: str
    info: FieldInfo

    @property
    def argument(self) -> str:
        """Return the name of the command's parameter."""
        return f"{self.part}_{self.name}"

    @property
    def option(self) -> Any:
        prefix = "" if self.part == "gateway" else f"{self.part}-"
        flag = prefix + self.name.replace("_", "-")
        is_switch = self.info.annotation is bool
        panel = {"rich_help_panel": _GATEWAYS} if self.part == "gateway" else {"hidden": True}
        names = f"--{flag}/--no-{flag}" if is_switch else f"--{flag}"
        option: Any = typer.Option(names, help=self.info.description, show_default=False, **panel)
        return Annotated[bool | None if is_switch else str | None, option]


def _settings() -> Iterator[_Setting]:
    for part, config in _PARTS.items():
        for name, info in config.model_fields.items():
            if name not in _OF_UP[part] and not (part == "gateway" and name in _WHERE):
                yield _Setting(part, name, info)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with those options in place of its parameter `settings`: those that are given, by part."""
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

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
