"""Strategies for messages that nobody should send: of any class by its descriptor, with values near every bound."""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
Hints = Mapping[str, st.SearchStrategy[Any]]
"""By a field's full name, without the package: what to draw for it instead of anything of its type. Of a repeated field
the whole list."""

_UINT32 = st.one_of(st.integers(0, 330), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
_SINT32 = st.one_of(st.integers(-9, 9), st.sampled_from([-(2**31), -1, 2**31 - 1]))
_UINT64 = st.one_of(st.integers(0, 8), st.sampled_from([2**32, 2**63 - 1, 2**63, 2**64 - 1]))
_FLOAT = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), -float("inf"), 1e38, 5e-324]), st.floats(0, 2)
)
_TEXT = st.one_of(st.sampled_from(["", "x", "\0", "é" * 300, "a" * 5000]), st.text(max_size=6))
_BYTES = st.one_of(st.sampled_from([b"", b"\0" * 4, b"\xff" * 64, b"\0" * 1280]), st.binary(max_size=8))
_COUNT = st.sampled_from([0, 1, 1, 2, 2, 3, 5, 17])
_PRESENT = st.integers(0, 3)
_F = FieldDescriptor
_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    _F.TYPE_UINT32: _UINT32,
    _F.TYPE_SINT32: _SINT32,
    _F.TYPE_UINT64: _UINT64,
    _F.TYPE_FIXED32: _UINT32,
    _F.TYPE_FIXED64: _UINT64,
    _F.TYPE_DOUBLE: _FLOAT,
    _F.TYPE_FLOAT: _FLOAT,
    _F.TYPE_BOOL: st.booleans(),
    _F.TYPE_STRING: _TEXT,
    _F.TYPE_BYTES: _BYTES,
    _F.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 4, 99]),
}


def message_of(draw: Draw, kind: type[Any], hints: Hints) -> Any:
    """A message of this class. Fields with a hint are set, others three times out of four, of a oneof always one."""
    message = kind()
    chosen = {draw(st.sampled_from(list(oneof.fields))).name for oneof in _oneofs(message)}
    inside = {field.name for oneof in _oneofs(message) for field in oneof.fields}
    for field in message.DESCRIPTOR.fields:
        hinted = _name(field) in hints
        if field.name in chosen or (field.name not in inside and (hinted or draw(_PRESENT))):
            _set(draw, message, field, hints)
    return message


def _name(field: FieldDescriptor) -> str:
    return field.full_name.removeprefix("outrider.v1.")


def _oneofs(message: Any) -> list[Any]:
    """Without those that stand for optional fields."""
    return [oneof for oneof in message.DESCRIPTOR.oneofs if not oneof.name.startswith("_")]


def _set(draw: Draw, message: Any, field: FieldDescriptor, hints: Hints) -> None:
    hint = hints.get(_name(field))
    here = getattr(message, field.name)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if is_map:
        for _ in range(draw(_COUNT)):
            here[draw(_UINT32)] = draw(_FLOAT)
    elif field.is_repeated:
        here.extend(draw(hint) if hint is not None else [_value(draw, field, hints) for _ in range(draw(_COUNT))])
    elif field.message_type is not None:
        here.CopyFrom(draw(hint) if hint is not None else _value(draw, field, hints))
        here.SetInParent()
    else:
        setattr(message, field.name, draw(hint) if hint is not None else _value(draw, field, hints))


def _value(draw: Draw, field: FieldDescriptor, hints: Hints) -> Any:
    if field.message_type is not None:
        return message_of(draw, GetMessageClass(field.message_type), hints)
    return draw(_BY_TYPE[field.type])


def nudged(draw: Draw, message: Any, hints: Hints) -> Any:
    """This message, which is a valid one, with up to two fields of it or its parts drawn anew."""
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        part = message
        while True:
            inner = [value for field, value in part.ListFields() if field.message_type and not field.is_repeated]
            if not inner or draw(st.integers(0, 3)) == 0:
                break
            part = draw(st.sampled_from(inner))
        field = draw(st.sampled_from(list(part.DESCRIPTOR.fields)))
        part.ClearField(field.name)
        _set(draw, part, field, hints)
    return message


def mutated(draw: Draw, data: bytes) -> bytes:
    """With a few bytes changed, cut out, doubled or put in. Most are messages still."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        what = draw(st.sampled_from(["flip", "cut", "double", "insert", "end"]))
        if what == "flip" and changed:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del changed[at : at + draw(st.integers(1, 9))]
        elif what == "double":
            changed[at:at] = changed[at : at + 20]
        elif what == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=6))
        else:
            del changed[at:]
    return bytes(changed)


def floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def int32s(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)
