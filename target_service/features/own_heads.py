"""Medusa and blockwise heads in the target itself, as a `TargetDrafter`: they draft from features of the target's last
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.heads.head_loader import LoadedHead, load_head
from outrider.engine.heads.kinds import MEDUSA
from outrider.engine.heads.wiring import ProbeStates, judge, probe_ids, score_head, taps_to_probe
from outrider.engine.host_copy import to_host
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.drawing import propose_by_logits
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.speculation.target_drafter import TargetDrafter
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from target_service.features.features import Features

DIGEST = b"own"
"""Name under which the projection of the target's own heads is kept in `Features`. It is no SHA-256, so no draft
worker's head has it."""


class OwnHeads(TargetDrafter):
    """Drafter in the target with the target's own heads. The heads read the feature of the token before the last
    committed one: the last token in the cache.
    """

    def __init__(self, loaded: LoadedHead, features: Features) -> None:
        """Create the drafter; features for its heads are made from the next step on. Raises InvalidRequest if there is
        no memory for them.
        """
        self._heads = loaded.network
        self.max_len = loaded.network.facts.num_heads
        self._features = features
        self._slots: dict[SlotKey, Slot] = {}
        self._logits: dict[SlotKey, HostLogits] = {}
        """Logits of a slot's heads after its last committed token, [heads, V]. A slot is missing until the heads have
        run for it."""
        features.add_head(DIGEST, loaded.projection)

    def open(self, job: OpenJob, slot: Slot) -> None:
        self._slots[slot.key] = slot

    def commit(self, slot: Slot, num_same: int) -> None:
        self._logits.pop(slot.key, None)

    def append(self, slot: Slot, token_ids: Sequence[int]) -> Sequence[bool]:
        self.commit(slot, 0)
        return ()

    def has_next(self, slot: Slot) -> bool:
        return self._feature(slot) is not None

    def _feature(self, slot: Slot) -> Tensor | None:
        return self._features.feature(DIGEST, slot.key, len(slot.committed) - 2)

    def propose(self, slot: Slot, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int) -> CandidateTree:
        if slot.key not in self._logits and self.has_next(slot):
            self._run_heads()
        return propose_by_logits(slot, state, acceptance, max_tokens, self._logits.get(slot.key))

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        self._slots.pop(key, None)
        self._logits.pop(key, None)

    @torch.inference_mode()
    def _run_heads(self) -> None:
        # for all slots that have a feature and no logits, so that the host waits once
        keys = list[SlotKey]()
        features = list[Tensor]()
        for key, slot in self._slots.items():
            feature = self._feature(slot)
            if key not in self._logits and feature is not None:
                keys.append(key)
                features.append(feature)
        logits = self._heads(torch.stack(features))  # [S, heads, V]
        for key, own in zip(keys, to_host(*logits.unbind()), strict=True):
            self._logits[key] = HostLogits(own)


def load_own_heads(config: TargetConfig, runner: ModelRunner, tokenizer_json: bytes, features: Features) -> OwnHeads:
    """Load the heads that the setting `heads` names, and test on a probe text that their input is wired to the right
    layers. Raises ConfigError if they cannot be loaded or fail the test, or if the target gives no hidden states.
    """
    assert config.heads is not None, "the settings name no heads"
    if runner.features_refusal is not None:
        raise ConfigError(
            f"heads are {config.heads}, and the target gives no hidden states, for it {runner.features_refusal}; "
            "leave them out",
            param="heads",
        )
    settings = config.model_copy(update={"model": config.heads})
    try:
        loaded = load_head(settings, config.model, MEDUSA, config.allow_pickle)
    except ConfigError as error:  # its message names the setting model, and this one is heads
        raise ConfigError(f"heads are {config.heads}: {error.message}", param="heads") from None
    _reserve_memory(runner, loaded, config.heads)
    ids = probe_ids(tokenizer_json, runner.facts.context_limit)
    taps = taps_to_probe(loaded.projection.spec.taps, loaded.num_layers)
    states, best_ids = features.forward_text(ids, taps)  # [T, taps, hidden], [T]
    by_tap = dict[int, Tensor]()
    for index, tap in enumerate(taps):
        by_tap[tap] = states[:, index].cpu()  # [T, hidden]
    seen = ProbeStates(ids, by_tap, best_ids.cpu())
    why = judge(score_head(loaded, seen), config.heads, trusts=config.trust_draft_config)
    if why is not None:
        raise ConfigError(why, param="heads")
    return OwnHeads(loaded, features)


def _reserve_memory(runner: ModelRunner, loaded: LoadedHead, heads: str) -> None:
    facts = loaded.facts
    spare = runner.spare
    num_bytes = (
        facts.num_parameters * getattr(torch, facts.dtype).itemsize + loaded.projection.num_bytes + spare.tap_bytes
    )
    if num_bytes > spare.num_bytes:
        raise ConfigError(
            f"heads are {heads}, which take {num_bytes} bytes, and {spare.num_bytes} are free beside KV cache and "
            "steps; lower kv_cache_fraction or kv_cache_tokens",
            param="heads",
        )
    runner.spare = replace(spare, num_bytes=spare.num_bytes - num_bytes)
