"""Medusa's heads in training (1811.03115, 2401.10774). They share the target's lm_head, which is not trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.medusa import MedusaConfig, MedusaHeads, read_medusa
from outrider.training.optimizing import mixed_precision
from outrider.training.student import DraftLogits, write_tensors
from outrider.training.teacher import Batch, TargetOutput, indices_of


class Medusa:
    """Student that is a set of Medusa heads, each a residual layer. Head k drafts token k of a round."""

    ids = None
    """Token ids that the heads can propose: None, since they can propose all."""

    def __init__(self, heads: MedusaHeads, device: str) -> None:
        self._device = device
        self.module = heads.to(device, torch.float32).requires_grad_(True)
        self.module.lm_heads.requires_grad_(False)
        self.depth_trained = self.depth_limit = heads.facts.num_heads

    @classmethod
    def new(cls, target: TargetFiles, num_heads: int, device: str) -> Medusa:
        """Return untrained heads. The residual layer of each head adds zero, so that its distributions equal the
        target's next-token distributions.
        """
        facts = MedusaConfig(
            num_heads=num_heads,
            num_layers=1,
            width=target.width,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            shares_lm_head=True,
        )
        heads = MedusaHeads(facts)
        with torch.no_grad():
            for parameter in heads.blocks.parameters():
                parameter.zero_()
            heads.lm_heads.load_state_dict({"0.weight": target.lm_head()})
        return cls(heads, device)

    @classmethod
    def load(cls, folder: str, target: TargetFiles, device: str) -> Medusa:
        """Load the heads that `save` wrote to `folder`. Raises ConfigError for files that do not fit the target."""
        files = read_medusa(Checkpoint(folder), target)
        return cls(MedusaHeads.of(files.facts, files.tensors), device)

    def draft_logits(self, batch: Batch, target_output: TargetOutput, depth: int) -> Iterator[DraftLogits]:
        """Yield the logits of head 0, 1, ... `depth` - 1. Head k predicts the draft token at depth k, where depth 0 is
        the first draft token of a round.

        batch: the texts. target_output: the target's last hidden states along them, which all heads read.
        """
        hidden = target_output.hidden[NORMED].float()  # [B, T, dt] float32
        for skipped, block in enumerate(list(self.module.blocks)[:depth]):
            mask = batch.trained_mask(skipped)  # [B, T] bool
            rows = hidden[:, : -1 - skipped][mask[:, 1 + skipped :]]  # [M, dt] float32, 1 + skipped tokens back
            with mixed_precision(self._device):
                logits = self.module.lm_heads[0](block(rows))  # [M, V]
            yield DraftLogits(skipped, indices_of(mask), logits)

    def save(self, folder: Path) -> None:
        """Write the heads in bfloat16 to `folder`, with the tensor names of Medusa's repository. The lm_head is left
        out, since it is the target's.
        """
        facts = self.module.facts
        tensors = {}
        for name, tensor in self.module.blocks.state_dict().items():  # {head}.layers.{layer}.weight
            head, _, layer, kind = name.split(".")
            tensors[f"{head}.{layer}.linear.{kind}"] = tensor.detach().to("cpu", torch.bfloat16)
        write_tensors(folder, tensors)
        config = {
            "model_type": "medusa",
            "medusa_num_heads": facts.num_heads,
            "medusa_num_layers": facts.num_layers,
            "hidden_size": facts.width,
            "vocab_size": facts.vocab_size,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
