"""Facts of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.models.model_id import short_name


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that are fixed once a model is loaded."""

    model_id: str
    vocab_size: int
    """Width of the logits."""
    context_limit: int
    """Most tokens of prompt and output together; of source and output apart where there is an encoder."""
    dtype: str
    """float32, bfloat16 or float16."""
    device: str
    """cpu or cuda:N."""
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    quantization: str = "none"
    """How the weights are quantised."""
    num_ranks: int = 1
    """Processes that the weights are split over."""
    num_layers: int = 0
    """Decoder layers; 0 where nobody taps them."""
    hidden_size: int = 0
    """Width of the hidden states, as num_layers."""
    layer_types: tuple[str, ...] = ()
    """Type of each decoder layer, of `architectures.layer_memory`; empty for heads, which keep keys and values."""
    num_lookahead: int = 0
    """Ids behind the vocabulary that may be fed and are never said: look-ahead embeddings."""
    is_text_part: bool = False
    """Whether the checkpoint reads images, video or sound, too, of which nothing is loaded."""
    decoder_start_ids: tuple[int, ...] = ()
    """What every answer of an encoder-decoder model begins with; empty for the others."""

    @property
    def name(self) -> str:
        """Return the model's name for messages that leave this process."""
        return short_name(self.model_id)

    @property
    def num_ids(self) -> int:
        """Return how many ids may be fed."""
        return self.vocab_size + self.num_lookahead

    @property
    def num_sequences(self) -> int:
        """Return how many sequences of KV a request has: its own, and that of its source where there is an encoder."""
        return 2 if self.decoder_start_ids else 1
