"""EAGLE-3's head in training, by its training-time test (2503.01840, section 3.2; SpecForge's core/eagle3.py).

When it is served, the head reads the target's hidden states of committed tokens; for a draft token it reads its own
output (its carry) at the token before. So in training the head runs over a text once for each draft token of a chain:
step 0 reads the target's hidden states, and step k reads the carries of step k - 1, shifted by one token. Entry i of
step k is then draft token k of a chain that began at entry i - k, and attends to what that chain attends to.

    # N = 4 entries, 2 steps; the head's entry 2 in step 1 continues the chain that began at entry 1:
    # step 0:  e0 e1 e2 e3      reads the target's hidden states
    # step 1:   - f1 f2 f3      f2 reads the carry of e1, and attends to e0, e1 and f2
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
from outrider.training.student import DraftLogits, write_tensors
from outrider.training.teacher import Batch, TargetOutput, indices_of
from outrider.wire.errors import ConfigError

ATTENTION = "outrider_unrolled"
"""Name under which the attention function of this module is registered with transformers."""


class Steps(Cache):
    """KV cache of a head in EAGLE-3's training-time test: for each layer the keys and values of all steps so far, [B,
    Hkv, steps * N, D] each. Step k runs the head for draft token k of every chain.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of one step of the training-time test in layer `layer_idx`, [B, Hkv, N, D] each.
        Return the layer's keys and values of all steps so far, [B, Hkv, steps * N, D] each. `args`, `kwargs`: not used.
        """
        keys = key_states
        values = value_states
        if layer_idx in self._stored:
            previous_keys, previous_values = self._stored[layer_idx]
            keys = torch.cat([previous_keys, key_states], dim=2)  # [B, Hkv, steps * N, D]
            values = torch.cat([previous_values, value_states], dim=2)
        self._stored[layer_idx] = keys, values
        return keys, values


def attention_mask(num_entries: int, step: int, device: torch.device) -> Tensor:
    """Return the attention mask of step `step`, from 0, of the training-time test: [N, (step + 1) * N] bool, over the
    keys of steps 0 to `step`. True = the entry attends to the key.

    num_entries: N, the number of entries of each step, one per token position. In step k, entry i is draft token k of
    the chain that began at entry i - k. It attends to the entries 0 to i - k of step 0, and to its chain's own entry in
    each later step.
    """
    # N = 4, step = 1; row 2 is [1 1 0 0 | 0 0 1 0]: e0, e1 of step 0 and f2 of step 1
    entries = torch.arange(num_entries, device=device)  # [N]
    start = entries[:, None] - step  # [N, 1]
    masks = [entries <= start]  # [N, N] bool, of step 0
    for later in range(1, step + 1):
        masks.append(entries == start + later)  # [N, N] bool
    return torch.cat(masks, dim=1)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    num_entries = query.shape[2]
    mask_of_step = attention_mask(num_entries, key.shape[2] // num_entries - 1, query.device)
    output = attend_masked(query, key, value, mask_of_step, scaling, repeats_heads=query.is_cuda)
    return output.transpose(1, 2), None


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, *, repeats_heads: bool
) -> Tensor:
    """Return the attention [B, H, N, D] of query [B, H, N, D] over M keys and values [B, Hkv, M, D]. mask: [N, M]
    bool, True = attends. scaling: factor on the scores.

    repeats_heads: whether keys and values are copied for each query head. On a GPU they must be: with enable_gqa torch
    takes a mask only in its math backend, which allocates all scores, [B, H, N, M] float32.
    """
    if repeats_heads:
        num_repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(num_repeats, dim=1)
        value = value.repeat_interleave(num_repeats, dim=1)
    return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=not repeats_heads)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


class ProjectedHead(nn.Module):
    """An EAGLE-3 head and its projection `fc` of the target's hidden states, as one module to train."""

    def __init__(self, facts: Eagle3Config) -> None:
        super().__init__()
        self.head = Eagle3Head(facts)
        self.head.config._attn_implementation = ATTENTION
        self.fc = nn.Linear(len(facts.taps) * facts.target_width, facts.width, bias=False)

    @classmethod
    def new(
        cls, target: TargetFiles, start: str | None, taps: Sequence[int], kept: Tensor | None, seed: int
    ) -> ProjectedHead:
        """Return an untrained head: one random layer with the sizes of a layer of a source model, with the source's
        embedding and lm_head.

        start: folder of a draft model as the source. None = the target is the source, and its embedding is not trained.
        taps: indices of the hidden states of the target that the head reads. kept: the token ids [Vd] int64 that the
        head can propose, ascending; None = all ids of the target. seed: seed of the random weights. Raises ConfigError
        if the source's layer is not shaped like Llama's.
        """
        source = target
        if start is not None:
            source = TargetFiles(start)
        num_ids = target.vocab_size
        if kept is not None:
            num_ids = len(kept)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = cls(_create_config(source, target, taps, num_ids))
        head = module.head
        lm_head = source.lm_head()  # [V, d]
        head.embed_tokens.weight.data = source.embedding().float().clone()
        if kept is not None:
            head.draft_ids = kept
            lm_head = lm_head[kept]  # [Vd, d]
        head.lm_head.weight.data = lm_head.float().clone()
        if start is None:
            head.embed_tokens.requires_grad_(False)
        elif source.config.tie_word_embeddings and kept is None:
            head.lm_head.weight = head.embed_tokens.weight
        return module

    def forward(self, ids: Tensor, taps: Tensor, num_steps: int) -> list[Tensor]:
        """Return the inputs of the lm_head in each step of the training-time test: a list of num_steps tensors [B, N,
        d], where N = T - 1.

        In step k, entry i belongs to draft token k of the chain that began at entry i - k. From it the lm_head predicts
        the token at index i + 2 of `ids`. Entries before entry k have no chain, and no meaning. ids: [B, T] int64.
        taps: [B, T, m, dt], m hidden states of the target for each token. num_steps: number of draft tokens of a chain.
        """
        head = self.head
        hidden = self.fc(taps[:, :-1].flatten(2))  # [B, N, d], of the token before
        embedded = head.embed_tokens(ids[:, 1:])  # [B, N, d]
        rotary = head.rotary_emb(embedded, torch.arange(embedded.shape[1], device=ids.device)[None])
        cache = Steps()
        outputs = []
        for _ in range(num_steps):
            hidden = head.run_layers(hidden, embedded, rotary, cache)
            normed = head.norm(hidden)
            outputs.append(normed if head.facts.is_lm_head_normed else hidden)
            carries = normed if head.facts.is_carry_normed else hidden
            hidden = torch.cat([torch.zeros_like(carries[:, :1]), carries[:, :-1]], dim=1)  # shifted by one token
        return outputs


class Eagle3:
    """Student that is an EAGLE-3 head with its projection."""

    depth_limit = None
    """Maximum number of draft tokens of a round: None, since the head can draft any number."""

    def __init__(self, module: ProjectedHead, num_steps: int, device: str) -> None:
        """Move the head to the device. num_steps: number of draft tokens of a chain that are trained."""
        self.module = module.to(device)
        self.depth_trained = num_steps
        self._device = device

    @property
    def ids(self) -> Tensor | None:
        """Token ids [Vd] int64 that the head can propose; None = all ids of the target."""
        return self.module.head.draft_ids

    @classmethod
    def load(cls, folder: str, target: TargetFiles, device: str) -> Eagle3:
        """Load the head that `save` wrote to `folder`. Raises ConfigError for files that do not fit the target."""
        files = read_eagle3(Checkpoint(folder), target)
        module = ProjectedHead(files.facts)
        module.head.load_state_dict(dict(files.tensors))
        assert files.projection.fc is not None
        module.fc.load_state_dict({"weight": files.projection.fc})
        return cls(module, 1, device)

    def draft_logits(self, batch: Batch, target_output: TargetOutput, depth: int) -> Iterator[DraftLogits]:
        """Yield the head's logits for the draft tokens at depth 0, 1, ... `depth` - 1, where depth 0 is the first draft
        token of a round. Each depth is one step of EAGLE-3's training-time test. Step 0 reads the target's hidden
        states; each later step reads the head's own output of the step before.

        batch: the texts. target_output: the target's hidden states along them.
        """
        with mixed_precision(self._device):
            outputs = self.module(batch.ids, target_output.taps(self.module.head.facts.taps), depth)
        for step, output in enumerate(outputs):
            mask = batch.trained_mask(step)  # [B, T] bool
            with mixed_precision(self._device):
                logits = self.module.head.lm_head(output[mask[:, 1:]])  # [M, Vd]
            yield DraftLogits(step, indices_of(mask), logits)

    def save(self, folder: Path) -> None:
        """Write head and projection in bfloat16 to `folder`, in the layout of EAGLE's repository.

        An embedding that was not trained is left out, since it is the target's own.
        """
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


def _create_config(source: TargetFiles, target: TargetFiles, taps: Sequence[int], num_ids: int) -> Eagle3Config:
    text: Any = source.config.get_text_config(decoder=True)
    try:
        rope = text.rope_parameters
        rope = rope.get("full_attention", rope)  # by type of layer where the types differ; a head has full attention
        return Eagle3Config(
            layers=llama_layers(text, text.hidden_size, target.vocab_size, 1, rope),
            width=text.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=num_ids,
            taps=tuple(taps),
            target_width=target.width,
        )
    except AttributeError as error:
        raise ConfigError(
            f"a layer of {source.model} is not shaped like Llama's ({error}); name a draft that is with --start"
        ) from None
