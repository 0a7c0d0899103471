"""Folders of drafts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.engine.heads.checkpoint import Checkpoint

MODEL = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight")


def files(folder: Path, config: dict[str, Any], names: tuple[str, ...] = MODEL) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return Checkpoint(str(folder))
