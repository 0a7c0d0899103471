"""The projection of a head: from the target's hidden states of a token to one feature of the head's width.

The draft reads it from the head's files and sends it at registration. The target checks and runs it, so that one
feature is sent for each committed token instead of several hidden states. For heads that read a single hidden state it
is the identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

import safetensors.torch
import torch
from pydantic import ConfigDict, Field, TypeAdapter
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.files.model_files import MAX_QUOTED
from outrider.wire.errors import InvalidRequest
from outrider.wire.peer_text import bound_text

Norm = Literal["none", "each", "all"]
"""RMS norm before the projection. none: there is none; each: one norm for each tap (EAGLE-3.1's fc_norm); all: one norm
over all taps concatenated."""
MAX_PROJECTION_BYTES = 1 << 30
"""Maximum size of a serialised projection in bytes, 1 GiB. From three taps of width 8192 to features of width 8192 it
takes 400 MB in bfloat16."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the tensors of a projection may have. All tensors of one projection have the same dtype."""


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """Which of the target's hidden states a head reads (its taps), and how they are projected to a feature."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    taps: tuple[int, ...]
    """Indices of the target's hidden states that the head reads, in the order in which they are concatenated: 0 = the
    embeddings, k = the output of layer k (from 1), -1 (`NORMED`) = the last output after the final norm."""
    width: Annotated[int, Field(ge=1)]
    """d, width of the features."""
    norm: Norm = "none"
    epsilon: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """Epsilon of the RMS norms."""
    norms_output: bool = False
    """Whether an RMS norm follows the projection (DFlash's hidden_norm)."""

    def shapes(self, target_width: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the projection's tensors by name, for a target of this width. Do not call it for the
        identity projection, which has no tensors.
        """
        num_taps = len(self.taps)
        shapes: dict[str, tuple[int, ...]] = {"fc": (self.width, num_taps * target_width)}
        if self.norm == "each":
            shapes["norm"] = (num_taps, target_width)
        elif self.norm == "all":
            shapes["norm"] = (num_taps * target_width,)
        if self.norms_output:
            shapes["output_norm"] = (self.width,)
        return shapes


_SPEC = TypeAdapter(ProjectionSpec)


class Projection(nn.Module):
    """Projection of a token's hidden states to its feature; a draft worker sends it to the target, which runs it."""

    fc: Tensor | None
    norm: Tensor | None
    output_norm: Tensor | None

    def __init__(self, spec: ProjectionSpec, tensors: Mapping[str, Tensor]) -> None:
        """Create a projection from tensors of the shapes `spec.shapes`. Without tensors it is the identity on its
        single tap.
        """
        super().__init__()
        self.spec = spec
        for name in ("fc", "norm", "output_norm"):
            self.register_buffer(name, tensors.get(name))

    @classmethod
    def identity(cls, width: int) -> Projection:
        """Return the projection without a linear map: a token's feature is the target's last hidden state of it, after
        the final norm. `width`: width of that hidden state.
        """
        return cls(ProjectionSpec((NORMED,), width), {})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the projection by name: the linear map `fc`, and weights of its norms. Empty for the identity."""
        return dict(self.named_buffers())

    @property
    def num_bytes(self) -> int:
        """Size of the projection's tensors in memory, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def forward(self, taps: Tensor) -> Tensor:
        """Return features [N, d] bfloat16 from hidden states `taps` [N, taps, dt], in the order of `spec.taps`."""
        return self.exact(taps).to(torch.bfloat16)

    def exact(self, taps: Tensor) -> Tensor:
        """Return features [N, d] from hidden states `taps` [N, taps, dt], in the order of `spec.taps`, in the
        projection's own dtype, not rounded to bfloat16.
        """
        if self.fc is None:
            return taps[:, 0]
        taps = taps.to(self.fc.dtype)
        if self.norm is not None:
            normed = taps.shape[1:]  # over all of a token's numbers together
            if self.spec.norm == "each":
                normed = taps.shape[2:]
            taps = rms_norm(taps, normed, eps=self.spec.epsilon) * self.norm.view(taps.shape[1:])
        features = linear(taps.flatten(1), self.fc)
        if self.spec.norms_output:
            features = rms_norm(features, features.shape[-1:], self.output_norm, self.spec.epsilon)
        return features

    def to_bytes(self) -> bytes:
        """Return the projection's `spec` and its tensors in safetensors' format. Equal projections give equal bytes."""
        spec = json.dumps(asdict(self.spec), sort_keys=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}  # a pickle's may be a view
        return safetensors.torch.save(tensors, {"spec": spec})  # one key: several would have no fixed order

    @classmethod
    def from_bytes(cls, data: bytes, target_width: int, num_layers: int) -> Projection:
        """Return, on the CPU, the projection that a draft worker sent as `data`.

        Raises `InvalidRequest` if it does not fit a target of this width and number of layers: other shapes or dtypes,
        non-finite numbers, taps that the target does not have, or more than `MAX_PROJECTION_BYTES`.
        """
        if len(data) > MAX_PROJECTION_BYTES:
            raise InvalidRequest(f"a head's projection has {len(data)} bytes, at most {MAX_PROJECTION_BYTES} are taken")
        spec, tensors = _parse(data)
        check_taps(spec.taps, num_layers)
        _check_tensors(spec, tensors, target_width)
        return cls(spec, tensors)


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raise `InvalidRequest` if a target with `num_layers` layers does not have the hidden states `taps`."""
    max_taps = num_layers + 2
    if not 1 <= len(taps) <= max_taps or min(taps) < NORMED or max(taps) > num_layers:
        raise InvalidRequest(
            f"a head reads the taps {list(taps[:max_taps])}, {len(taps)} in all; the target has {num_layers} layers, "
            f"hence must be 1 to {max_taps} of the taps {NORMED} to {num_layers}; is it another target's head?",
            param="taps",
        )


def digest_of(data: bytes) -> bytes:
    """Return the SHA-256 of a serialised projection, its name in messages between draft workers and targets."""
    return hashlib.sha256(data).digest()


def label_of(digest: bytes) -> str:
    """Return the name of a head in metrics and logs: the first 8 hexadecimal digits of its projection's SHA-256."""
    return digest[:4].hex()


def _parse(data: bytes) -> tuple[ProjectionSpec, dict[str, Tensor]]:
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _SPEC.validate_json(header["__metadata__"]["spec"]), tensors
    except Exception as error:  # safetensors, json, torch and pydantic each raise their own for malformed bytes
        why = bound_text(f"{type(error).__name__}: {' '.join(str(error).split())}", MAX_QUOTED)
        raise InvalidRequest(f"a head's projection cannot be read: {why}") from error


def _check_tensors(spec: ProjectionSpec, tensors: Mapping[str, Tensor], target_width: int) -> None:
    if not tensors and spec == ProjectionSpec(spec.taps[:1], target_width, epsilon=spec.epsilon):
        return  # the identity
    shapes = spec.shapes(target_width)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise InvalidRequest(
            f"a head's projection has the tensors {bound_text(str(found), MAX_QUOTED)}, must have {shapes} for "
            f"{len(spec.taps)} taps of {target_width}; is it another target's head?"
        )
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        raise InvalidRequest(f"a head's projection is in {dtypes}, must be one of {DTYPES}, and the same for all")
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InvalidRequest(f"{name} of a head's projection has numbers that are not finite")
