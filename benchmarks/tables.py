"""Tables of GitHub's Markdown, for result files. Imports nothing, so that the GPU kit has it on a bare machine."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of GitHub's Markdown, with its numbers to the right of the first column."""
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    lines.insert(1, "|---" + "|---:" * (len(columns) - 1) + "|")
    return "\n".join(lines)
