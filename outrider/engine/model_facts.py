"""Facts about a loaded model, which its worker reports and on which its slots rely. Created by the loaders of models
and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.models.model_id import short_name


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model or a head that are fixed when it is loaded."""

    model_id: str
    """Folder, GGUF file or hub id of the model."""
    vocab_size: int
    """V, the number of logits at a position."""
    context_limit: int
    """Maximum number of tokens of prompt and output together. In an encoder-decoder model it limits the source and the
    output separately."""
    dtype: str
    """Dtype of the weights: float32, bfloat16 or float16."""
    device: str
    """Device of the weights: cpu or cuda:N."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end an output."""
    num_parameters: int
    """Number of parameters of the model or head; tied weights count once."""
    quantization: str = "none"
    """How the weights are quantised: the name of a method; "none" = they are not."""
    num_ranks: int = 1
    """Number of processes over which the weights are split."""
    num_layers: int = 0
    """Number of decoder layers of the model; 0 for a head."""
    hidden_size: int = 0
    """Width of the model's hidden states, which heads may read; 0 for a head."""
    layer_types: tuple[str, ...] = ()
    """Type of each decoder layer, such as "full_attention" or "sliding_attention" (transformers' words). Empty for
    heads, all of whose layers keep keys and values of every token."""
    num_lookahead: int = 0
    """Number of look-ahead embeddings. Their ids follow the vocabulary; they may be fed and are never in an output."""
    is_text_part: bool = False
    """Whether only the text part of the checkpoint is loaded, without the parts for images, video or sound."""
    decoder_start_ids: tuple[int, ...] = ()
    """Token ids with which every output of an encoder-decoder model begins; empty for other models."""

    @property
    def name(self) -> str:
        """The model's name for messages that leave this process. The folders of a path are left out."""
        return short_name(self.model_id)

    @property
    def num_ids(self) -> int:
        """Number of token ids that may be fed: the vocabulary and the look-ahead embeddings."""
        return self.vocab_size + self.num_lookahead

    @property
    def num_sequences(self) -> int:
        """Number of sequences that a request has in the KV cache: 1, or 2 with an encoder's source."""
        if self.decoder_start_ids:
            return 2
        return 1
