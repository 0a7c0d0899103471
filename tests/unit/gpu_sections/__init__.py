"""Sections for the GPU kit's runner that fail in every way, and one that does not. They import no torch."""
