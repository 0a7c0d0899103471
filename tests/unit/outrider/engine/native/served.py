"""Which path serves a model."""

from __future__ import annotations

from outrider.engine.loading.loader import load_runner
from outrider.wire.settings.config import TargetConfig


def path_name(model: str, attention_path: str = "auto") -> str:
    runner = load_runner(
        TargetConfig(
            model=model,
            device="cpu",
            dtype="float32",
            kv_cache_tokens=256,
            max_slots=2,
            context_limit=None,
            attention_path=attention_path,
        )
    )
    return runner.path.name
