"""What a worker's engine thread has loaded, and what GetInfo says of it. The same for both workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider import __version__
from outrider.engine.loader import default_prefill_tokens, load_runner, tokenizer_files
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.leading import load_split
from outrider.engine.paths.forward_path import Prepares
from outrider.engine.slots import SlotTable
from outrider.engine.step_times import StepTimes
from outrider.v1 import common_pb2 as pb
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.errors import OutriderError
from outrider.wire.fingerprint import tokenizer_fingerprint
from outrider.wire.rpc import check_message_size


@dataclass
class Loaded:
    """What the engine thread made: the model and its slots."""

    runner: ModelRunner
    slots: SlotTable
    tokenizer: pb.TokenizerFiles
    fingerprint: str
    """Of the tokenizer; worked out once, since parsing a large vocabulary would hold up the event loop."""
    epoch: int
    config: DraftConfig | TargetConfig
    cpu_cores: tuple[int, ...]
    """Of the engine thread."""
    metrics_address: str = ""
    num_tickets: Callable[[], int] = field(default=lambda: 0)
    times: StepTimes = field(default_factory=StepTimes)
    """Of the engine thread."""
    draining: Callable[[], bool] = field(default=lambda: False)
    close: Callable[[], None] = field(default=lambda: None)
    """Ends the processes that hold shares of the weights. After the engine."""

    @property
    def max_prefill_tokens(self) -> int:
        return self.config.max_prefill_tokens or default_prefill_tokens(self.runner.device)

    def info(self) -> pb.WorkerInfo:
        facts, pool = self.runner.facts, self.runner.pool
        return pb.WorkerInfo(
            model_id=facts.model_id,
            vocab_size=facts.vocab_size,
            tokenizer_fingerprint=self.fingerprint,
            context_limit=facts.context_limit,
            dtype=facts.dtype,
            device=facts.device,
            epoch=self.epoch,
            pid=os.getpid(),
            cpu_cores=self.cpu_cores,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            num_slots=self.config.max_slots,
            num_slots_in_use=self.slots.num_in_use,
            num_kv_blocks=pool.num_blocks,
            num_kv_blocks_in_use=pool.num_in_use,
            num_kv_blocks_cached=pool.num_cached,
            kv_block_size=pool.block_size,
            attention_path=self.runner.path.name,
            metrics_address=self.metrics_address,
            eos_token_ids=facts.eos_token_ids,
            num_tickets=self.num_tickets(),
            num_steps=self.times.num_steps,
            busy_us=int(self.times.busy_s * 1e6),
            longest_step_us=int(self.times.longest_s * 1e6),
            current_step_us=int(self.times.current_s * 1e6),
            draining=self.draining(),
            version=__version__,
            num_parameters=facts.num_parameters,
            batch_invariant=self.runner.path.batch_invariant,
            quantization=facts.quantization,
            tensor_parallel=facts.num_ranks,
            kv_bytes_per_token=self.runner.kv_bytes_per_token,
        )


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
    files = tokenizer_files(config.model)
    tokenizer = pb.TokenizerFiles(
        tokenizer_json=files.tokenizer_json,
        tokenizer_config_json=files.tokenizer_config_json,
        chat_template=files.chat_template,
    )
    fingerprint = tokenizer_fingerprint(tokenizer.tokenizer_json)
    return Loaded(runner, slots, tokenizer, fingerprint, epoch, config, tuple(sorted(os.sched_getaffinity(0))))
