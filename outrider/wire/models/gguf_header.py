"""`read_header` reads the header of a GGUF file: the values that describe its model, and the positions of its tensors.
Called to load a model, and to choose a machine for it.

The `gguf` package reads headers too, but it takes 10 s for a file with 262,144 tokens and raises IndexErrors for a
damaged file. Lists of texts are skipped here, because transformers reads those that the tokenizer needs.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Versions of the GGUF format that can be read. Version 1 (summer 2023) is not among them, since its counts have 32
bits."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Maps the number of a scalar type in a GGUF file to its format character in Python's `struct`."""
TEXT = 8
"""Number of the value type "string" in a GGUF file."""
ARRAY = 9
"""Number of the value type "array" in a GGUF file."""
MAX_HEADER_BYTES = 64 << 20
"""Maximum bytes of the header of a GGUF file. A vocabulary of 262,144 tokens with its merges takes 17 MiB of it."""
MAX_ELEMENTS = 1 << 21
"""Maximum number of elements of an array in the header of a GGUF file. A tokenizer.json has the same limit."""
MAX_DIMENSIONS = 4
"""Maximum number of dimensions of a tensor, set by the GGUF format."""
ALIGNMENT = 32
"""Default alignment of the tensor data in bytes, set by the GGUF format."""
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
"""Pattern of the end of the name of a file that is one part of a split GGUF model; the group is the number of parts."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Type, shape and offset of one tensor, as the header of a GGUF file gives them."""

    shape: tuple[int, ...]
    """Dimensions in torch's order: the last dimension is contiguous."""
    type_id: int
    """Number of the element type, a value of `gguf.GGMLQuantizationType`."""
    offset: int
    """Position of the tensor in bytes, counted from the start of the data section after the header."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a GGUF file: the model's metadata, and type, shape and offset of each tensor."""

    path: Path
    architecture: str
    """Name of the model's architecture in the GGUF format, such as "llama"."""
    values: dict[str, Any]
    """Metadata of the file by key, such as "llama.block_count". In place of an array of strings there is only its
    length."""
    tensors: dict[str, GgufTensor]
    """Type, shape and offset of each tensor, by the tensor's name."""
    num_data_bytes: int
    """Number of bytes of the GGUF file after its header."""

    def stated(self, name: str) -> Any:
        """Return the metadata value with the key "<architecture>.<name>", for a name such as `block_count`. None = the
        file has no such key.
        """
        return self.values.get(f"{self.architecture}.{name}")


def read_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file. Raises ConfigError for a damaged file and for one part of a split model."""
    part = PART.search(path.name)
    if part is not None and int(part[1]) > 1:
        raise _parts_error(path, int(part[1]))
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="model") from None
    return _read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, num_bytes: int, _changed_ns: int) -> GgufHeader:
    if num_bytes == 0:
        raise _damaged(path, "it is empty")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="model") from None
    num_parts = header.values.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        raise _parts_error(path, num_parts)
    return header


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != MAGIC:
        raise _damaged(path, "it does not begin with GGUF")
    cursor = _Cursor(data, 4)
    try:
        version = cursor.number("I")
        if version not in VERSIONS:
            raise ConfigError(
                f"{path} is GGUF of version {version}, and versions 2 and 3 are read, with the low byte first; convert "
                "the model again",
                param="model",
            )
        num_tensors = cursor.number("Q")
        num_values = cursor.number("Q")
        values = {}
        for _ in range(num_values):
            name = cursor.text()
            values[name] = cursor.value(cursor.number("I"))
        tensors = {}
        for _ in range(num_tensors):
            name = cursor.text()
            tensors[name] = cursor.tensor()
    except (struct.error, ValueError) as error:  # the header is cut, or holds what is no text or no type
        raise _damaged(path, bound_text(str(error))) from None
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        raise _damaged(path, "it has no general.architecture")
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _damaged(path, f"general.alignment is {alignment!r}")
    data_start = -(-cursor.offset // alignment) * alignment  # rounded up
    return GgufHeader(path, architecture, values, tensors, len(data) - data_start)


class _Cursor:
    # Each read moves `offset`, in bytes, behind what it returns. Reads raise struct.error or ValueError.

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def number(self, letter: str) -> Any:
        (found,) = self._numbers(letter, 1)
        return found

    def _numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{letter}"
        self._check_remaining(count * struct.calcsize(f"<{letter}"))
        found = struct.unpack_from(layout, self._data, self.offset)
        self.offset += struct.calcsize(layout)
        return found

    def text(self) -> str:
        return self._bytes().decode("utf-8")

    def _bytes(self) -> bytes:
        length = self.number("Q")
        self._check_remaining(length)
        found = self._data[self.offset : self.offset + length]
        self.offset += length
        return found

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value has the type {kind}")
        element = self.number("I")
        count = self.number("Q")
        if count > MAX_ELEMENTS:
            raise ValueError(f"a list has {count} elements, and at most {MAX_ELEMENTS} are read")
        if element in SCALARS:
            return list(self._numbers(SCALARS[element], count))
        if element != TEXT:
            raise ValueError(f"a list has elements of type {element}")
        for _ in range(count):  # texts are skipped
            self._bytes()
        return count

    def tensor(self) -> GgufTensor:
        num_dimensions = self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        shape = self._numbers("Q", num_dimensions)
        type_id = self.number("I")
        offset = self.number("Q")
        return GgufTensor(tuple(reversed(shape)), type_id, offset)

    def _check_remaining(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.offset:
            raise ValueError("its header goes on behind its end")
        if self.offset + num_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is no whole GGUF file: {why}; get the file again", param="model")


def _parts_error(path: Path, num_parts: int) -> ConfigError:
    return ConfigError(
        f"{path} is one of {num_parts} parts of a model, and parts are not read; join them into one file: "
        "llama-gguf-split --merge FIRST_PART JOINED",
        param="model",
    )
