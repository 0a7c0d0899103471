"""Which path serves a model."""

from typing import Any

from outrider.engine.loading.loader import load_runner
from outrider.wire.settings.config import TargetConfig


def path_name(model: str, attention_path: str = "auto") -> str:
    settings: dict[str, Any] = {"kv_cache_tokens": 256, "max_slots": 2, "attention_path": attention_path}
    return load_runner(TargetConfig(model=model, device="cpu", **settings)).path.name
