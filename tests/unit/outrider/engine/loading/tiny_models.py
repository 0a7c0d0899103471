"""Tiny models of a folder, loaded."""

from typing import Any

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.wire.settings.config import TargetConfig


def load(model: str, **changes: Any) -> ModelRunner:
    options: dict[str, Any] = {"device": "cpu", "max_slots": 2, "attention_path": "dense"}
    return load_runner(TargetConfig(model=model, **{**options, **changes}))
