"""The header of a GGUF file from anybody."""

import importlib.util
import os
import struct
from pathlib import Path

import pytest

from outrider.engine.files.tokenizer_files import read_tokenizer
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.files.gguf_refusals import refusal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers.integrations.gguf") is None, reason="this transformers reads no GGUF"
)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (struct.pack("<IIQ", 9, 0, 4 << 30), "a list has 4294967296 elements, and at most 2097152 are read"),
        (struct.pack("<IIQ", 9, 8, 1 << 31), "a list has 2147483648 elements"),
        (struct.pack("<IQ", 8, 4 << 30), "its header has more than 64 MiB"),
    ],
)
def test_a_header_of_any_size_takes_no_memory(stated: bytes, message: str, tmp_path: Path) -> None:
    """The file takes no room on a disk either: what is behind its beginning is a hole."""
    path = tmp_path / "hole.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + stated)
    os.truncate(path, 6 << 30)
    assert message in refusal(str(path))
    with pytest.raises(ConfigError, match=message):
        read_tokenizer(str(path))


def test_more_blocks_than_anything_has_are_refused_before_they_are_counted(file: str, tmp_path: Path) -> None:
    path, name = tmp_path / "tiny.gguf", b"llama.block_count" + struct.pack("<I", 4)
    data = Path(file).read_bytes()
    place = data.index(name) + len(name)
    path.write_bytes(data[:place] + struct.pack("<I", 1 << 31) + data[place + 4 :])
    assert "llama.block_count in" in refusal(str(path)) and "is 2147483648" in refusal(str(path))
