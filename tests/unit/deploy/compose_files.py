"""The Compose files, read."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[3]


@cache
def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((REPO / name).read_text())
    return values


def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def in_compose_files() -> set[str]:
    names = ("docker-compose.yml", "docker-compose.gpu.yml", "deploy/docker/draft.yml")
    text = "".join((REPO / name).read_text() for name in names)
    return set(re.findall(r"\$\{([A-Z_]+)", text))


def in_example() -> set[str]:
    return set(re.findall(r"^#([A-Z][A-Za-z_]*)=", (REPO / ".env.example").read_text(), re.MULTILINE))
