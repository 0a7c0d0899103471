"""Load the state that the engine thread of a worker owns: runner, slots and tokenizer. The model is whole or split over
ranks.

Called by the target worker, by draft workers with a model, by training and by `outrider alpha`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from outrider.engine.attention.forward_path import PreparedPath
from outrider.engine.files.model_files import GENERATION, read_model_json
from outrider.engine.files.tokenizer_files import read_tokenizer, tokens_beyond
from outrider.engine.loading.cache_size import default_prefill_tokens
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.group import STEP_TIMEOUT
from outrider.engine.parallel.team import ParallelPath, Team
from outrider.engine.worker.slots import Slot, SlotTable
from outrider.engine.worker.source_slot import SourceSlot
from outrider.engine.worker.worker_handle import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.requests.sampling_defaults import read_defaults
from outrider.wire.settings.config import TargetConfig, WorkerConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)


@dataclass
class ModelWorkerState(WorkerState):
    """State of a worker with a model: the state that every worker has, and the model's runner."""

    runner: ModelRunner = field(kw_only=True)
    """Runner of the model's forwards on its KV cache."""
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """Values of sampling parameters by name, from the checkpoint's generation_config.json. They hold for a request that
    does not set the parameter."""

    @property
    def max_prefill_tokens(self) -> int:
        """Maximum number of prompt tokens in a step: the setting or, if it is None, the default for the device."""
        return self.config.max_prefill_tokens or default_prefill_tokens(self.runner.device)

    def info(self) -> pb.WorkerInfo:
        """Return the worker's description, which GetInfo sends to other processes."""
        info = super().info()
        info.MergeFrom(describe_model(self.runner.facts, self.runner))
        info.supports_trees = info.supports_beams = self.runner.supports_trees
        info.supports_features = self.runner.features_refusal is None
        info.features_refusal = self.runner.features_refusal or ""
        info.sampling_defaults.CopyFrom(pb.SamplingDefaults(**self.sampling_defaults))
        return info


def describe_model(facts: ModelFacts, runner: ModelRunner | None) -> pb.WorkerInfo:
    """Return the description of a model or a head that GetInfo sends to other processes. runner: runner of the model's
    forwards; None for a head without a KV cache.
    """
    info = pb.WorkerInfo(
        model_id=facts.model_id,
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        device=facts.device,
        attention_path="none",
        eos_token_ids=facts.eos_token_ids,
        num_parameters=facts.num_parameters,
        quantization=facts.quantization,
        tensor_parallel=facts.num_ranks,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        decoder_start_ids=facts.decoder_start_ids,
        is_text_only=facts.is_text_part,
    )
    if runner is not None:
        info.attention_path = runner.path.name
        info.is_batch_invariant = runner.path.batch_invariant
        info.num_kv_blocks = runner.pool.num_blocks
        info.num_kv_blocks_in_use = runner.pool.num_in_use
        info.num_kv_blocks_cached = runner.pool.num_cached
        info.kv_block_size = runner.pool.block_size
        info.kv_bytes_per_token = runner.kv_bytes_per_token
    return info


def load(
    config: WorkerConfig,
    epoch: int,
    on_lost: Callable[[OutriderError], None] = lambda error: None,
    ranks_folder: str | None = None,
) -> ModelWorkerState:
    """Load the model and the tokenizer of `config`, and allocate the slots. Call it on the engine thread.

    epoch: number of the worker's life, another one at each start. on_lost: called from another thread when the process
    of a rank above 0 of a tensor-parallel target ends by itself. ranks_folder: folder with the socket to which ranks
    that another process starts connect; None = this process starts them. Raises a ConfigError that names what cannot be
    served, and Unavailable for a lost rank.
    """
    if not isinstance(config, TargetConfig) or config.tensor_parallel == 1:
        return _create_state(load_runner(config), config, epoch)
    runner, team = load_split(config, on_lost, ranks_folder)
    try:
        loaded = _create_state(runner, config, epoch)
    except BaseException:
        team.close()
        raise
    loaded.close = team.close
    return loaded


def load_split(
    config: TargetConfig,
    on_lost: Callable[[OutriderError], None],
    ranks_folder: str | None = None,
    step_timeout: timedelta = STEP_TIMEOUT,
) -> tuple[ModelRunner, Team]:
    """Load a model split over this process (rank 0) and the processes of other ranks, test it and allocate its KV
    cache. Return the runner, and the team of the other ranks, which must be closed after use.

    on_lost: called once, from any thread, if another rank ends or the ranks may no longer be in the same step.
    ranks_folder: folder with the socket to which ranks that another process starts connect; None = this process starts
    them. step_timeout: a rank that takes longer in a forward is considered dead.

    Raises a ConfigError that names what cannot be served, and Unavailable if a rank does not connect or is lost
    meanwhile; no other rank is left running then. If a rank ended without a report, Unavailable also replaces a
    ConfigError of rank 0, which that loss may have caused.
    """
    if ":" in config.device:
        raise ConfigError(
            f"device is {config.device!r} and tensor_parallel {config.tensor_parallel}: ranks take the first devices "
            "that this process sees; say cuda and choose with CUDA_VISIBLE_DEVICES",
            param="device",
        )
    team = Team(config.tensor_parallel, on_lost, step_timeout)
    try:
        runner = load_runner(config, lambda device: team.gather(device, config, ranks_folder))
        team.begin_steps()
        runner.path = ParallelPath(runner.path, team, runner.facts.vocab_size)
    except BaseException as error:
        lost = team.loss_error
        team.close()
        if lost is not None and (team.lost_in_silence or not isinstance(error, ConfigError)):
            raise lost from error
        raise
    return runner, team


def _create_state(runner: ModelRunner, config: WorkerConfig, epoch: int) -> ModelWorkerState:
    runner.pool.prefix.enabled = config.prefix_caching
    if isinstance(runner.path, PreparedPath):
        runner.path.prepare(config.max_slots, runner.facts.context_limit)
    elif runner.facts.num_ranks > 1 and runner.device.type == "cuda":
        log.warning("tensor_parallel is %d: a split model runs without CUDA graphs, eagerly", runner.facts.num_ranks)
    has_encoder = bool(runner.facts.decoder_start_ids)
    slot_class = SourceSlot if has_encoder else Slot
    slots = SlotTable(runner.pool, config.max_slots, runner.facts.context_limit, slot_class, has_sources=has_encoder)
    tokenizer = read_tokenizer(config.model)
    beyond = tokens_beyond(tokenizer.tokenizer, runner.facts.vocab_size)
    if beyond is not None:
        log.warning("%s: %s", config.model, beyond)
    defaults = _read_sampling_defaults(config)
    return ModelWorkerState(config, epoch, slots, tokenizer.files, runner=runner, sampling_defaults=defaults)


def _read_sampling_defaults(config: WorkerConfig) -> dict[str, float]:
    if not isinstance(config, TargetConfig):  # requests are sampled as their target's checkpoint states
        return {}
    defaults, refusals = read_defaults(read_model_json(config.model, GENERATION) or {})
    for refusal in refusals:
        log.warning("%s of %s: %s; it is left out", GENERATION, config.model, refusal)
    return defaults
