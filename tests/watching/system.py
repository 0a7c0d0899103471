"""The system that is watched: two targets, two drafts and a gateway with few places, and what can be done to it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from outrider.wire.api_keys import ApiKey, digest_of, new_key, write_keys
from tests.stack import DEMO_DRAFT, Pools, Process, running_pools
from tests.tiny_models import random_model

NUM_USERS = 6
"""Of the usual load: half of the places, and little of the KV cache."""
MAX_RUNNING, MAX_QUEUE = 12, 24
KV_CACHE_TOKENS = 2560
"""Little more than a context: six answers with long prompts fill it."""
KEYS = {name: new_key() for name in ("free", "limited")}
KEY_FILE = "keys.yaml"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Pools]:
    with running_pools(
        2,
        2,
        target_args=("--kv-cache-tokens", str(KV_CACHE_TOKENS)),
        gateway_args=(
            *("--max-running", str(MAX_RUNNING), "--max-queue", str(MAX_QUEUE), "--max-queue-wait-s", "600"),
            *("--api-keys", str(write_key_file(folder))),
        ),
        log_folder=folder,
    ) as pools:
        yield pools


def write_key_file(folder: Path) -> Path:
    limits = {"free": {}, "limited": {"requests_per_minute": 20}}
    path = folder / KEY_FILE
    write_keys(path, tuple(ApiKey(name=name, sha256=digest_of(KEYS[name]), **limits[name]) for name in KEYS))
    return path


def write_half_a_key_file(folder: Path) -> None:
    (folder / KEY_FILE).write_text("keys: [{name: fr")


def clueless_draft(folder: Path) -> Path:
    """A draft of the demo pair's vocabulary that has learnt nothing: its guesses are hardly ever accepted."""
    disable_progress_bar()
    config = AutoConfig.from_pretrained(DEMO_DRAFT)
    random_model(config, seed=1).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(Path(DEMO_DRAFT) / name, folder / name)
    return folder


def with_model(pools: Pools, draft: Process, model: str) -> None:
    """The draft again at its ports, with other weights."""
    draft.args[draft.args.index("--model") + 1] = model
    pools.restart(draft)
