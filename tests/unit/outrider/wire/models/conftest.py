"""Fixtures of the tests beside."""

from tests.unit.outrider.engine.files.conftest import file, folder, llama, plain

__all__ = ["file", "folder", "llama", "plain"]
