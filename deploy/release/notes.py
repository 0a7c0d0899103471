"""NOTES.md of a release: what changes for whoever upgrades, from CHANGELOG.md, and the versions that were tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

KINDS = ("Removed", "Changed", "Deprecated", "Security", "Fixed", "Added")
"""Keep a Changelog's, those first that ask something of whoever upgrades."""
PYTHON = "Programming Language :: Python :: "
TOLD = ("torch", "transformers", "ray", "grpcio", "protobuf", "fastapi", "pydantic", "tokenizers")


class ReleaseError(Exception):
    """Says why nothing was released, and what to do."""


def version_of(tree: Path) -> str:
    """Return the version of a checkout."""
    version: str = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def notes(tree: Path) -> str:
    """Return the notes of the version in `tree`, a checkout. Raises ReleaseError where CHANGELOG.md has none of it."""
    version = version_of(tree)
    parts = changes((tree / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    text = [f"# Outrider {version}", "How a fleet is upgraded, and how this release is verified: docs/releases.md."]
    for kind in sorted(parts, key=KINDS.index):
        text += [f"## {kind}", parts[kind]]
    return "\n\n".join([*text, "## Versions tested", versions(tree)]) + "\n"


def changes(changelog: str, version: str) -> dict[str, str]:
    """Return the version's entries by kind.

    Raises ReleaseError where it has none, or some under no kind, or a kind that nobody knows, is empty or stands twice.
    """
    found = re.search(
        rf"^## \[(?:{re.escape(version)}\]|Unreleased\] - {re.escape(version)}$).*?\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    first, *pieces = re.split(r"^### (.+)\n", found[1], flags=re.MULTILINE) if found else [""]
    kinds, texts = [kind.strip() for kind in pieces[::2]], [text.strip() for text in pieces[1::2]]
    if not kinds:
        raise ReleaseError(
            f"CHANGELOG.md says nothing of version {version}: write `## [{version}] - DATE` with entries"
        )
    if unknown := set(kinds) - set(KINDS):
        raise ReleaseError(f"CHANGELOG.md has {sorted(unknown)} under {version}; the kinds are {', '.join(KINDS)}")
    if first.strip():
        raise ReleaseError(
            f"CHANGELOG.md has entries of no kind under {version}: {first.split()[:9]}; put them under one"
        )
    if repeated := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ReleaseError(f"CHANGELOG.md has {repeated} more than once under {version}; join them")
    parts = dict(zip(kinds, texts, strict=True))
    if empty := sorted(kind for kind, text in parts.items() if not text):
        raise ReleaseError(
            f"CHANGELOG.md has nothing in {empty} under {version}; write entries, or leave the heading out"
        )
    return parts


def versions(tree: Path) -> str:
    """Return the table of the oldest and the newest versions that the tests passed with."""
    oldest, newest = (pins(tree / name) for name in ("constraints-oldest.txt", "constraints.txt"))
    classifiers = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    pythons = [one.removeprefix(PYTHON) for one in classifiers if one.startswith(PYTHON)]
    rows = [("Python", pythons[0], pythons[-1]), *((name, oldest[name], newest[name]) for name in TOLD)]
    return "\n".join(["| | oldest | newest |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def pins(constraints: Path) -> dict[str, str]:
    """Return the versions that a constraints file pins, by normalized name."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}
