"""The projection: its features, its bytes on the wire, and what a target refuses of another's."""

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.projection import Projection, ProjectionSpec, digest_of
from outrider.wire.errors import InvalidRequest

LAYERS, WIDTH, OUT, EPSILON = 8, 16, 24, 0.1
"""A large epsilon, so that a map without it shows."""


def some_map(
    norm: Any, dtype: torch.dtype = torch.float32, taps: tuple[int, ...] = (2, 0, NORMED), *, after: bool = False
) -> Projection:
    generator, wide = torch.Generator().manual_seed(1), len(taps) * WIDTH
    tensors = {"fc": torch.randn(OUT, wide, generator=generator) / 6}
    if norm != "none":
        weight = 0.4 + torch.rand(wide, generator=generator)
        tensors["norm"] = weight.view(len(taps), WIDTH) if norm == "each" else weight
    if after:
        tensors["output_norm"] = 0.4 + torch.rand(OUT, generator=generator)
    return Projection(
        ProjectionSpec(taps, OUT, norm, EPSILON, after), {name: t.to(dtype) for name, t in tensors.items()}
    )


def straight(projection: Projection, taps: Tensor) -> Tensor:
    """Row by row in float64: [N, m, dt] -> [N, d]."""
    rows = []
    for row in taps.double():
        line = row.flatten()
        norm, parts = projection.tensors.get("norm"), [line]
        if projection.spec.norm == "each":
            parts = list(row)
        if projection.spec.norm != "none":
            assert norm is not None
            parts = [part / (part.square().mean() + EPSILON).sqrt() for part in parts]
            line = torch.cat(parts) * norm.double().flatten()
        opened = projection.tensors["fc"].double() @ line
        if projection.spec.norms_output:
            opened = opened / (opened.square().mean() + EPSILON).sqrt() * projection.tensors["output_norm"].double()
        rows.append(opened)
    return torch.stack(rows)


@pytest.mark.parametrize("after", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("norm", ["none", "each", "all"])
def test_rows_are_those_of_the_formula(norm: str, after: bool) -> None:
    projection, taps = some_map(norm, after=after), torch.randn(5, 3, WIDTH)
    sent = Projection.from_bytes(projection.to_bytes(), WIDTH, LAYERS)
    assert sent.spec == projection.spec and sent.to_bytes() == projection.to_bytes()
    assert sent.num_bytes == sum(tensor.nbytes for tensor in projection.tensors.values())
    truth = straight(projection, taps)
    assert (sent.double().exact(taps.double()) - truth).abs().max() < 1e-12 * truth.abs().max()
    rows = Projection.from_bytes(projection.to_bytes(), WIDTH, LAYERS)(taps)
    assert rows.dtype is torch.bfloat16 and (rows - truth).abs().max() < 1e-2 * truth.abs().max()


def test_a_transposed_tensor_is_sent_as_any_other() -> None:
    """As a pickle may hold one."""
    projection = some_map("none")
    fc = projection.tensors["fc"].T.contiguous().T
    assert not fc.is_contiguous()
    assert Projection(projection.spec, {"fc": fc}).to_bytes() == projection.to_bytes()


def test_the_identity_hands_on_one_tap() -> None:
    projection = Projection(ProjectionSpec((NORMED,), WIDTH), {})
    sent = Projection.from_bytes(projection.to_bytes(), WIDTH, LAYERS)
    taps = torch.randn(4, 1, WIDTH)
    assert torch.equal(sent(taps), taps[:, 0].bfloat16()) and sent.num_bytes == 0


def test_another_map_has_another_digest() -> None:
    one, other = some_map("each"), some_map("each")
    assert digest_of(one.to_bytes()) == digest_of(other.to_bytes())
    other.tensors["fc"][3, 4] += 1e-3
    assert digest_of(one.to_bytes()) != digest_of(other.to_bytes())
    assert digest_of(one.to_bytes()) != digest_of(some_map("each", taps=(2, 1, NORMED)).to_bytes())
    assert len(digest_of(b"")) == 32


def spec(**changes: Any) -> Callable[[], bytes]:
    def data() -> bytes:
        projection = some_map("each")
        return Projection(replace(projection.spec, **changes), projection.tensors).to_bytes()

    return data


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[], bytes]:
    def data() -> bytes:
        projection = some_map("each")
        changed = dict(projection.tensors)
        change(changed)
        return safetensors.torch.save(changed, {"spec": json.dumps(asdict(projection.spec))})

    return data


def metadata(text: str) -> Callable[[], bytes]:
    return lambda: safetensors.torch.save(some_map("each").tensors, {"spec": text})


REFUSALS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "cannot be read"),
    "no format": (lambda: b"\xff" * 64, "cannot be read"),
    "a header past the end": (lambda: struct.pack("<Q", 1 << 40) + b"{}", "cannot be read"),
    "cut off": (lambda: some_map("each").to_bytes()[:-1], "cannot be read"),
    "no spec": (lambda: safetensors.torch.save(some_map("each").tensors), "cannot be read"),
    "a spec that nests": (metadata("[" * 20000), "cannot be read"),
    "an unknown field": (
        metadata('{"taps": [1], "width": 4, "norm": "none", "epsilon": 0.1, "norms_output": false, "bias": 1}'),
        "bias Unexpected",
    ),
    "a norm of the output that is not there": (spec(norms_output=True), r"must have .*'output_norm': \(24,\)"),
    "no taps": (spec(taps=()), r"taps \[\], 0 in all"),
    "too many taps": (spec(taps=(1,) * 11), "11 in all"),
    "a tap too deep": (spec(taps=(1, 2, 9)), r"taps \[1, 2, 9\], 3 in all; .* must be 1 to 10 of the taps -1 to 8"),
    "an epsilon that is no number": (spec(epsilon=float("nan")), "epsilon Input should be less than"),
    "a width that no memory holds": (spec(width=1 << 40), r"must have {'fc': \(1099511627776, 48\)"),
    "another width": (spec(width=OUT + 1), r"'fc': \(24, 48\).* must have {'fc': \(25, 48\)"),
    "fewer taps": (spec(taps=(1, 2)), r"'fc': \(24, 48\).* must have {'fc': \(24, 32\)"),
    "a norm that is not there": (
        tensors(lambda t: t.pop("norm")),
        r"has the tensors {'fc': \(24, 48\)}, must have .*'norm'",
    ),
    "a tensor more": (tensors(lambda t: t.update(bias=torch.ones(2))), r"has the tensors .*'bias': \(2,\).* must have"),
    "no tensors": (tensors(dict.clear), "has the tensors {}"),
    "many tensors": (
        tensors(lambda t: t.update({f"bias{i}": torch.ones(2) for i in range(999)})),
        r"^a head's projection has the tensors .{1,400}, must have",
    ),
    "whole numbers": (tensors(lambda t: t.update(fc=t["fc"].to(torch.int8))), "int8"),
    "float64": (tensors(lambda t: t.update(fc=t["fc"].double())), "float64"),
    "two dtypes": (tensors(lambda t: t.update(norm=t["norm"].bfloat16())), "the same for all"),
    "not a number": (tensors(lambda t: t["norm"][1].fill_(float("nan"))), "norm .* not finite"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_target_refuses_what_is_no_map_of_its_own(name: str) -> None:
    data, message = REFUSALS[name]
    with pytest.raises(InvalidRequest, match=message):
        Projection.from_bytes(data(), WIDTH, LAYERS)


def test_a_map_past_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_map("none").to_bytes()
    monkeypatch.setattr("outrider.engine.heads.projection.MAX_PROJECTION_BYTES", len(data) - 1)
    with pytest.raises(InvalidRequest, match=f"has {len(data)} bytes, at most {len(data) - 1}"):
        Projection.from_bytes(data, WIDTH, LAYERS)
