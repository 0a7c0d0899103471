"""Medusa's and blockwise heads in the target itself: they read what its last step left, and nothing travels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_host
from outrider.engine.heads.loader import LoadedMedusa, load_medusa
from outrider.engine.heads.wiring import Seen, judge, probe_ids, score_medusa, taps_to_probe
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.chain import propose_by_logits
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.target_drafter import TargetDrafter
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from target_service.feature_jobs import AddHead
from target_service.features import Features


class OwnHeads(TargetDrafter):
    """Proposes by the last row of each slot."""

    def __init__(self, loaded: LoadedMedusa, features: Features) -> None:
        """Have the target make rows for them from now on."""
        self.heads = loaded.heads
        self._features = features
        self._slots: dict[SlotKey, Slot] = {}
        self._known: dict[SlotKey, tuple[int, HostLogits]] = {}
        """Number of committed tokens, and the logits [heads, V] behind them."""
        self._digest = b"own"  # none that a draft registers, whose map may be the same and goes with it
        features.handle(AddHead(self._digest, loaded.opening, lambda error: None))

    def open(self, job: OpenJob, slot: Slot) -> None:
        self._slots[slot.key] = slot

    def has_next(self, slot: Slot) -> bool:
        return self._row(slot) is not None

    def _row(self, slot: Slot) -> Tensor | None:
        """Return the row [width] of the token before the last committed one, where it is here."""
        return self._features.row(self._digest, slot.key, len(slot.committed) - 2)

    def propose(self, slot: Slot, state: SamplingState, shares: SlotShares, max_tokens: int) -> CandidateTree:
        logits = self._logits(slot) if self.has_next(slot) else None
        return propose_by_logits(slot, state, shares, max_tokens, logits)

    def commit(self, slot: Slot, num_same: int) -> None:
        """Rows of other tokens may come up to the same length."""
        known = self._known.get(slot.key)
        if known is not None and known[0] > num_same:
            del self._known[slot.key]

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        """The rows are dropped with the slot's features."""
        del self._slots[key]
        self._known.pop(key, None)

    def _logits(self, slot: Slot) -> HostLogits:
        """Return the heads' logits [heads, V] behind the last committed token, where the row before it is here."""
        if self._is_pending(slot):
            self._run_heads()
        return self._known[slot.key][1]

    def _is_pending(self, slot: Slot) -> bool:
        known = self._known.get(slot.key)
        return known is None or known[0] != len(slot.committed)

    @torch.inference_mode()
    def _run_heads(self) -> None:
        """Run the heads for all slots whose last row they have not read: the host waits for all at once."""
        pending = [slot for slot in self._slots.values() if self._is_pending(slot)]
        rows = [(slot, row) for slot in pending if (row := self._row(slot)) is not None]
        logits = self.heads(torch.stack([row for _, row in rows]))  # [S, heads, V]
        for (slot, _), own in zip(rows, to_host(*logits.unbind()), strict=True):
            self._known[slot.key] = (len(slot.committed), HostLogits(own))


def load_own_heads(config: TargetConfig, runner: ModelRunner, tokenizer_json: bytes, features: Features) -> OwnHeads:
    """Load the heads of the settings, and test their wiring. Raises ConfigError."""
    assert config.heads is not None, "the settings name no heads"
    if runner.features_refusal is not None:
        raise ConfigError(
            f"heads are {config.heads}, and the target gives no hidden states, for it {runner.features_refusal}; "
            "leave them out",
            param="heads",
        )
    loaded = load_medusa(config.model_copy(update={"model": config.heads}), config.model, config.allow_pickle)
    _take_room(runner, loaded, config.heads)
    num_layers = runner.facts.num_layers
    ids = probe_ids(tokenizer_json, runner.facts.context_limit)
    taps = taps_to_probe(loaded.opening.spec.taps, num_layers)
    states, best_ids = features.see(ids, taps)
    seen = Seen(ids, {tap: states[:, index].cpu() for index, tap in enumerate(taps)}, best_ids.cpu())
    why = judge(score_medusa(loaded, seen, num_layers), config.heads, trusts=config.trust_draft_config)
    if why is not None:
        raise ConfigError(why, param="heads")
    return OwnHeads(loaded, features)


def _take_room(runner: ModelRunner, loaded: LoadedMedusa, heads: str) -> None:
    """Count the heads with the target's memory."""
    facts, spare = loaded.facts, runner.spare
    num_bytes = facts.num_parameters * getattr(torch, facts.dtype).itemsize + loaded.opening.num_bytes + spare.tap_bytes
    if num_bytes > spare.num_bytes:
        raise ConfigError(
            f"heads are {heads}, which take {num_bytes} bytes, and {spare.num_bytes} are free beside KV cache and "
            "steps; lower kv_cache_fraction or kv_cache_tokens",
            param="heads",
        )
    runner.spare = replace(spare, num_bytes=spare.num_bytes - num_bytes)
