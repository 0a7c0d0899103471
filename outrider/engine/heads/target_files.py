"""The target as a head's loader sees it: its widths, and the embedding and projection that many heads leave out."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.loading.loader import network_class, read_config
from outrider.engine.loading.tied_tables import IN_LAYER
from outrider.engine.loading.weight_headers import bounded_build
from outrider.wire.errors import ConfigError

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
PROJECTIONS = ("lm_head.weight", "embed_out.weight")


class TargetFiles:
    """A target's folder or hub id. Its weights are opened when one of them is asked for."""

    def __init__(self, model: str) -> None:
        """Read the configuration. Raises ConfigError."""
        self.model = model
        self.config = read_config(model)
        if self.config.is_encoder_decoder:
            raise ConfigError(
                f"{model} is an encoder-decoder model, and heads are of decoder-only ones; use a draft that is a model",
                param="target_model",
            )
        text = self.config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        """n."""
        self.width: int = text.hidden_size
        """dt."""
        self.vocab_size: int = text.vocab_size
        """V."""
        self._is_tied = bool(self.config.tie_word_embeddings)

    @cached_property
    def _weights(self) -> Checkpoint:
        return Checkpoint(self.model)

    def embedding(self) -> Tensor:
        """Return the table [V, dt]. Raises ConfigError where the files have none as it is."""
        return self._rows(EMBEDDINGS, "embedding")

    @property
    def embedding_scale(self) -> float:
        """What the target's embedding module multiplies rows of its table by: the root of the width in Gemma."""
        with bounded_build(f"the config.json of {self.model}", len(self._weights.names)):
            embedding = network_class(self.config)(self.config).get_input_embeddings()
        scale: float = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))
        return scale

    def projection(self) -> Tensor:
        """Return the lm_head [V, dt], which may be the embedding. Raises ConfigError as `embedding`."""
        has_own = any(self._ends(name, PROJECTIONS) for name in self._weights.names)
        return self._rows(PROJECTIONS, "lm_head") if has_own or not self._is_tied else self.embedding()

    @staticmethod
    def _ends(name: str, endings: tuple[str, ...]) -> bool:
        return any(name == ending or name.endswith(f".{ending}") for ending in endings)

    def _rows(self, endings: tuple[str, ...], what: str) -> Tensor:
        own = (name for name in sorted(self._weights.names) if not IN_LAYER.search(name))
        found = [name for name in own if self._ends(name, endings)]
        if len(found) != 1:
            raise ConfigError(
                f"the head has no {what} of its own, and {self.model} has {len(found)} tensors that may be one "
                f"({', '.join(found) or ' or '.join(endings)}); give the folder of its weights in float32 or bfloat16",
                param="target_model",
            )
        tensor = self._weights.tensor(found[0])
        fits = tensor.dim() == 2 and tensor.shape[0] >= self.vocab_size and tensor.shape[1] == self.width
        if not fits or not tensor.is_floating_point():
            raise ConfigError(
                f"{found[0]} of {self.model} is {list(tensor.shape)} {tensor.dtype}, must be "
                f"[{self.vocab_size}, {self.width}] and floating-point",
                param="target_model",
            )
        return tensor[: self.vocab_size]
