"""What the engine thread of a worker with a model has loaded. The same for both workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.engine.loader import default_prefill_tokens, load_runner, tokenizer_files
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.leading import load_split
from outrider.engine.paths.forward_path import Prepares
from outrider.engine.slots import SlotTable
from outrider.engine.worker_state import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.errors import OutriderError
from outrider.wire.rpc import check_message_size


@dataclass
class Loaded(WorkerState):
    """With a model."""

    runner: ModelRunner = field(kw_only=True)

    @property
    def max_prefill_tokens(self) -> int:
        return self.config.max_prefill_tokens or default_prefill_tokens(self.runner.device)

    def info(self) -> pb.WorkerInfo:
        facts, pool, info = self.runner.facts, self.runner.pool, super().info()
        info.MergeFrom(
            pb.WorkerInfo(
                model_id=facts.model_id,
                vocab_size=facts.vocab_size,
                dtype=facts.dtype,
                device=facts.device,
                num_kv_blocks=pool.num_blocks,
                num_kv_blocks_in_use=pool.num_in_use,
                num_kv_blocks_cached=pool.num_cached,
                kv_block_size=pool.block_size,
                attention_path=self.runner.path.name,
                eos_token_ids=facts.eos_token_ids,
                num_parameters=facts.num_parameters,
                batch_invariant=self.runner.path.batch_invariant,
                trees=self.runner.supports_trees,
                quantization=facts.quantization,
                tensor_parallel=facts.num_ranks,
                kv_bytes_per_token=self.runner.kv_bytes_per_token,
            )
        )
        return info


def load(
    config: DraftConfig | TargetConfig, epoch: int, on_lost: Callable[[OutriderError], None] = lambda error: None
) -> Loaded:
    """On the engine thread. Raises ConfigError naming what is missing or does not fit.

    on_lost: called from another thread when a process that holds a share of the weights ends by itself.
    """
    options = {
        "model": config.model,
        "device": config.device,
        "dtype": config.dtype,
        "kv_cache_tokens": config.kv_cache_tokens,
        "kv_cache_fraction": config.kv_cache_fraction,
        "max_prefill_tokens": config.max_prefill_tokens,
        "max_slots": config.max_slots,
        "context_limit": config.context_limit,
        "attention_path": config.attention_path,
        "batch_invariant": config.batch_invariant,
        "quantization": config.quantization,
    }
    if isinstance(config, DraftConfig) or config.tensor_parallel == 1:
        return _loaded(load_runner(**options), config, epoch)
    runner, team = load_split(options | {"tensor_parallel": config.tensor_parallel}, config, on_lost)
    try:
        loaded = _loaded(runner, config, epoch)
    except BaseException:
        team.close()
        raise
    loaded.close = team.close
    return loaded


def _loaded(runner: ModelRunner, config: DraftConfig | TargetConfig, epoch: int) -> Loaded:
    runner.pool.prefix.enabled = config.prefix_caching
    if isinstance(runner.path, Prepares):
        limit = runner.facts.context_limit
        runner.path.prepare(config.max_slots, limit, drafts=isinstance(config, DraftConfig))
    check_message_size(runner.facts.vocab_size, config.max_message_bytes)
    slots = SlotTable(runner.pool, config.max_slots, runner.facts.context_limit)
    return Loaded(config, epoch, slots, tokenizer_of(config.model), runner=runner)


def tokenizer_of(model: str) -> pb.TokenizerFiles:
    """Raises ConfigError when it has none."""
    files = tokenizer_files(model)
    return pb.TokenizerFiles(
        tokenizer_json=files.tokenizer_json,
        tokenizer_config_json=files.tokenizer_config_json,
        chat_template=files.chat_template,
    )
