"""Read keys of a draft's config.json and check their types. Used by the readers of heads, and for PARD drafts."""

from __future__ import annotations

from typing import Any

from outrider.engine.heads.checkpoint import Checkpoint

MAX_NUMBER = 1 << 31
"""Largest whole number allowed in config.json for a key without its own bound: 2^31."""


class Keys:
    """Reader of the keys of a config.json. Methods raise `ConfigError` for a value of another type, naming the key."""

    def __init__(self, files: Checkpoint, *parts: str) -> None:
        """Read the config of `files`. `parts`: names of objects in config.json that may hold the keys as well."""
        self.files = files
        self.config = files.config
        self.refusal = files.refusal
        self._places = [files.config, *(files.part(part) for part in parts)]

    def get(self, *names: str) -> Any:
        """Return the value of the key with one of these names; None without one. Raises `ConfigError` for two that
        differ.
        """
        found = None
        for name in names:
            for place in self._places:
                value = place.get(name)
                if value is None:
                    continue
                if found is not None and value != found:
                    both = f"is both {found} and {value}; leave one of them in config.json"
                    raise self.refusal(both, of=" or ".join(names))
                found = value
        return found

    def number(self, *names: str, least: int, most: int = MAX_NUMBER) -> int:
        """Return the whole number, from `least` to `most`, of the key with one of these names."""
        value = self.get(*names)
        if type(value) is not int or not least <= value <= most:
            what = f"is {value!r}, must be a whole number from {least} to {most}; correct its config.json"
            found = [name for name in names if self.get(name) is not None]
            raise self.refusal(what, of=" or ".join(found or names))
        return value

    def flag(self, name: str) -> bool | None:
        """Return the boolean of the key with this name; None without one."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.refusal(f"is {value!r}, must be true or false", of=name)
        return value
