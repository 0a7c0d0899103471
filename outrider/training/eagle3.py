"""EAGLE-3 in training, by its training-time test (2503.01840, section 3.2; SpecForge's core/eagle3.py).

In serving, only tokens that the target has committed have features; a draft token's entry has the head's own carry in
place of one. So the head is run over the text as often as it is to look ahead: step 0 over the features, step k over
the carries of step k - 1, each moved on by one token. An entry of step k at place i then is what a draft chain whose
last feature belongs to entry i - k has there, and sees what that chain sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head, read_eagle3
from outrider.engine.heads.llama_head import llama_layers
from outrider.training.optimizing import mixed_precision
from outrider.training.student import Guess, write_tensors
from outrider.training.teacher import Batch, Seen, places_of
from outrider.wire.errors import ConfigError

ATTENTION = "outrider_unrolled"


class Steps(Cache):
    """The keys and values of all steps of an unrolled head, one after the other: [B, KV, steps * N, hd] a layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value, layer = key_states, value_states, layer_idx
        if layer in self._stored:
            keys, values = self._stored[layer]
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        self._stored[layer] = key, value
        return key, value


def visible(num_entries: int, step: int, device: torch.device) -> Tensor:
    """Return [N, (step + 1) * N] bool: which keys of steps 0 to `step` an entry of that step sees.

    Of step 0 those up to the last feature of its chain, at entry i - step; of each later step its own chain's one.
    """
    place = torch.arange(num_entries, device=device)
    base = place[:, None] - step  # [N, 1]
    own = [place == base + later for later in range(1, step + 1)]  # each [N, N]
    return torch.cat([place <= base, *own], dim=1)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    num_entries = query.shape[2]
    mask_of_step = visible(num_entries, key.shape[2] // num_entries - 1, query.device)
    output = attend_masked(query, key, value, mask_of_step, scaling, repeats_heads=query.is_cuda)
    return output.transpose(1, 2), None


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, *, repeats_heads: bool
) -> Tensor:
    """Return [B, H, N, hd] of query [B, H, N, hd] over key and value [B, KV, M, hd], by a mask [N, M] bool.

    repeats_heads: give each query head its keys and values, as torch's memory-efficient kernel needs them on a GPU.
    With enable_gqa only the math backend takes a mask there, and holds all scores, [B, H, N, M] float32.
    """
    if repeats_heads:
        num_repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(num_repeats, dim=1)
        value = value.repeat_interleave(num_repeats, dim=1)
    return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=not repeats_heads)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


class Opened(nn.Module):
    """A head and its opening map, without a norm."""

    def __init__(self, facts: Eagle3Config) -> None:
        super().__init__()
        self.head = Eagle3Head(facts)
        self.head.config._attn_implementation = ATTENTION
        self.fc = nn.Linear(len(facts.taps) * facts.target_width, facts.width, bias=False)

    @classmethod
    def new(cls, target: TargetFiles, start: str | None, taps: Sequence[int], kept: Tensor | None, seed: int) -> Opened:
        """Return an untrained head with the shape of a layer, the embedding and the lm_head of the draft `start`.

        Without one they are the target's, and the embedding stays as it is. kept: the ids [Vd] int64 that it is to say,
        ascending; None for all. Raises ConfigError for a layer that is not shaped like Llama's.
        """
        source = target if start is None else TargetFiles(start)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = cls(_facts(source, target, taps, target.vocab_size if kept is None else len(kept)))
        head, projection = module.head, source.projection()
        head.embed_tokens.weight.data = source.embedding().float().clone()
        if kept is not None:
            head.draft_ids = kept
            projection = projection[kept]
        head.lm_head.weight.data = projection.float().clone()
        if start is None:
            head.embed_tokens.requires_grad_(False)
        elif source.config.tie_word_embeddings and kept is None:
            head.lm_head.weight = head.embed_tokens.weight
        return module

    def forward(self, ids: Tensor, taps: Tensor, num_steps: int) -> list[Tensor]:
        """Return for each step what the lm_head reads, [B, T - 1, d]: entry i is of the token i + 1.

        ids [B, T] int64, taps [B, T, m, dt]. Entry i of step k says what follows that token in a chain whose last
        feature belongs to entry i - k; where there is no such entry it says nothing.
        """
        head = self.head
        hidden = self.fc(taps[:, :-1].flatten(2))  # [B, N, d], of the token before
        embedded = head.embed_tokens(ids[:, 1:])
        rotary = head.rotary_emb(embedded, torch.arange(embedded.shape[1], device=ids.device)[None])
        steps, read = Steps(), []
        for _ in range(num_steps):
            hidden = head.run_layers(hidden, embedded, rotary, steps)
            normed = head.norm(hidden)
            read.append(normed if head.facts.reads_normed else hidden)
            carries = normed if head.facts.carries_normed else hidden
            hidden = torch.cat([torch.zeros_like(carries[:, :1]), carries[:, :-1]], dim=1)
        return read


class Eagle3:
    """A head of one layer, or more."""

    depth_limit = None

    def __init__(self, module: Opened, num_steps: int, device: str) -> None:
        self.module = module.to(device)
        self.depth_trained = num_steps
        self._device = device

    @property
    def ids(self) -> Tensor | None:
        return self.module.head.draft_ids

    @classmethod
    def load(cls, folder: str, target: TargetFiles, device: str) -> Eagle3:
        """Return what `save` wrote. Raises ConfigError."""
        files = read_eagle3(Checkpoint(folder), target)
        module = Opened(files.facts)
        module.head.load_state_dict(dict(files.tensors))
        assert files.opening.fc is not None
        module.fc.load_state_dict({"weight": files.opening.fc})
        return cls(module, 1, device)

    def guesses(self, batch: Batch, seen: Seen, depth: int) -> Iterator[Guess]:
        with mixed_precision(self._device):
            read = self.module(batch.ids, seen.taps(self.module.head.facts.taps), depth)
        for step, output in enumerate(read):
            asked = batch.asked(step)
            with mixed_precision(self._device):
                logits = self.module.head.lm_head(output[asked[:, 1:]])  # [M, Vd]
            yield Guess(step, places_of(asked), logits)

    def save(self, folder: Path) -> None:
        """Write them in the original repository's layout; the embedding is left out where it is the target's."""
        head, facts = self.module.head, self.module.head.facts
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in head.state_dict().items()}
        tensors["fc.weight"] = self.module.fc.weight
        kept = tensors.pop("draft_ids", None)
        is_tied = head.lm_head.weight is head.embed_tokens.weight
        if is_tied:
            del tensors["lm_head.weight"]
        if not head.embed_tokens.weight.requires_grad:
            del tensors["embed_tokens.weight"]
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
        if kept is not None:
            kept = kept.cpu()
            tensors["d2t"] = kept - torch.arange(len(kept))
            tensors["t2d"] = torch.zeros(facts.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
        write_tensors(folder, tensors)
        layers = facts.layers
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": facts.width,
            "intermediate_size": layers.intermediate_size,
            "num_hidden_layers": layers.num_hidden_layers,
            "num_attention_heads": layers.num_attention_heads,
            "num_key_value_heads": layers.num_key_value_heads,
            "head_dim": layers.head_dim,
            "rms_norm_eps": layers.rms_norm_eps,
            "rope_parameters": dict(layers.rope_parameters),
            "max_position_embeddings": layers.max_position_embeddings,
            "vocab_size": facts.vocab_size,
            "draft_vocab_size": facts.draft_vocab_size,
            "target_hidden_size": facts.target_width,
            "eagle_aux_hidden_state_layer_ids": list(facts.taps),
            "tie_word_embeddings": is_tied,
            "dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _facts(source: TargetFiles, target: TargetFiles, taps: Sequence[int], num_rows: int) -> Eagle3Config:
    text: Any = source.config.get_text_config(decoder=True)
    try:
        rope = text.rope_parameters
        rope = rope.get("full_attention", rope)  # keyed by kind of layer where those differ; a head sees all
        return Eagle3Config(
            layers=llama_layers(text, text.hidden_size, target.vocab_size, 1, rope),
            width=text.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=num_rows,
            taps=tuple(taps),
            target_width=target.width,
        )
    except AttributeError as error:
        raise ConfigError(
            f"a layer of {source.model} is not shaped like Llama's ({error}); name a draft that is with --start"
        ) from None
