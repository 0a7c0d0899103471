"""Facts of a loaded model, which its worker reports and its slots rely on. Made by the loaders of models and heads."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.models.model_id import short_name


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that are fixed once a model or a head is loaded."""

    model_id: str
    """Folder or hub id."""
    vocab_size: int
    """Width of the logits."""
    context_limit: int
    """Most tokens of prompt and output together. An encoder-decoder model may have as many of each."""
    dtype: str
    """Dtype of the weights: float32, bfloat16 or float16."""
    device: str
    """Device of the weights: cpu or cuda:N."""
    eos_token_ids: tuple[int, ...]
    """Ids that end an output."""
    num_parameters: int
    """Number of weights; tied ones count once."""
    quantization: str = "none"
    """How the weights are quantised."""
    num_ranks: int = 1
    """Number of processes that the weights are split over."""
    num_layers: int = 0
    """Number of decoder layers; 0 where no hidden states can be tapped."""
    hidden_size: int = 0
    """Width of the hidden states; 0 where num_layers is."""
    layer_types: tuple[str, ...] = ()
    """Type of each decoder layer, as in `architectures.layer_memory`; empty for heads, which keep keys and values."""
    num_lookahead: int = 0
    """Number of look-ahead embeddings: ids above the vocabulary, which may be fed and are never in an output."""
    is_text_part: bool = False
    """Whether the checkpoint also reads images, video or sound, of which nothing is loaded."""
    decoder_start_ids: tuple[int, ...] = ()
    """Ids with which every output of an encoder-decoder model begins; empty for other models."""

    @property
    def name(self) -> str:
        """The model's name for messages that leave this process: without the folders of a path."""
        return short_name(self.model_id)

    @property
    def num_ids(self) -> int:
        """Number of ids that may be fed: the vocabulary and the look-ahead embeddings."""
        return self.vocab_size + self.num_lookahead

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the KV cache for each request: its own, and an encoder's source."""
        if self.decoder_start_ids:
            return 2
        return 1
