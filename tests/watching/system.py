"""The system that is watched: two targets, two drafts, a registry that lists them, a gateway with few places. And what
can be done to it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, write_keys
from tests.forked import Forked
from tests.stack import DEMO_DRAFT, Pools, Process, running_pools
from tests.tiny_models import random_model

NUM_USERS = 6
"""Of the usual load: half of the places, and little of the KV cache."""
NUM_CLIENTS = 2
"""Of the healthy default."""
MAX_RUNNING, MAX_QUEUE = 12, 24
KV_CACHE_TOKENS = 2560
"""Little more than a context: six answers with long prompts fill it."""
KEYS = {name: new_key() for name in ("free", "limited")}
KEY_FILE = "keys.yaml"
DRAFT = "draft"
"""Folder of the drafts' model, whose weights can be replaced."""
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass
class Registry:
    """A process with the launcher's registry, which lists these workers; they keep their addresses. `address` stays."""

    pools: Pools
    log: Path
    address: str = "127.0.0.1:0"
    _process: Forked = field(init=False)

    def start(self) -> None:
        members = (self.pools.targets, self.pools.drafts)
        workers = [",".join(member.address for member in role) for role in members]
        self._process = Forked("tests.watching.registry", [self.address, *workers], self.log)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the registry did not start: {self.log.read_text()}")
        self.address = json.loads(line)["address"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._process.stdout.close()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[tuple[Pools, Registry]]:
    kv_cache = ("--kv-cache-tokens", str(KV_CACHE_TOKENS))
    draft = shutil.copytree(DEMO_DRAFT, folder / DRAFT)
    with running_pools(2, 2, 0, draft=str(draft), target_args=kv_cache, log_folder=folder) as pools:
        registry = Registry(pools, folder / "registry.log")
        registry.start()
        try:
            pools.gateways.append(
                Process("gateway", _gateway_args(folder, registry.address), stderr_path=folder / "gateway.log")
            )
            yield pools, registry
        finally:
            registry.kill()


def _gateway_args(folder: Path, registry: str) -> list[str]:
    limits = {
        "--num-draft-tokens": "auto",  # the default, in place of that of Process
        "--max-running": MAX_RUNNING,
        "--max-queue": MAX_QUEUE,
        "--max-queue-wait-s": 600,
    }
    settings = {"--registry": registry, "--port": 0, "--grpc-port": 0, "--api-keys": write_key_file(folder), **limits}
    return [str(part) for setting in settings.items() for part in setting]


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


def with_weights_of(pools: Pools, folder: Path, source: Path) -> None:
    """The drafts again at their ports and under the same id, with other weights."""
    shutil.copy(source / WEIGHTS, folder / WEIGHTS)
    os.replace(folder / WEIGHTS, folder / DRAFT / WEIGHTS)
    for draft in list(pools.drafts):
        pools.restart(draft)
