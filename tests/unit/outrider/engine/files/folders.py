"""Folders of models that a test changes, and what they are refused with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig

TEXT = "a<|tool|> b</think>\n[x]</s>"


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None takes one out."""
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def load(folder: Path | str, **settings: Any) -> ModelRunner:
    options: dict[str, Any] = {"kv_cache_tokens": 1024, "max_slots": 2, "attention_path": "paged", **settings}
    return load_runner(TargetConfig(model=str(folder), device="cpu", dtype="auto", **options))


Change = Callable[[Path], object]


def load_dense(folder: Path) -> Any:
    return load(folder, kv_cache_tokens=256, attention_path="dense")


def refusal(read: Callable[[], object]) -> str:
    """Return what a folder is refused with, which is one line."""
    with pytest.raises(ConfigError) as caught:
        read()
    assert "\n" not in caught.value.message
    return caught.value.message


def write(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def with_fields(name: str, **values: Any) -> Change:
    """Return what changes fields of a JSON file, which may be missing."""

    def apply(folder: Path) -> None:
        path = folder / name
        before = json.loads(path.read_bytes()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))

    return apply
