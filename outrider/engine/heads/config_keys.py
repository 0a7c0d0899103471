"""Read keys of a draft's config.json and check their types. Used by the readers of heads, and for PARD drafts."""

from __future__ import annotations

from typing import Any

from outrider.engine.heads.checkpoint import Checkpoint

MAX_NUMBER = 1 << 31
"""Largest whole number that is accepted in config.json, 2^31, for keys that have no smaller bound."""


class Keys:
    """Reader of the keys of a config.json. Its methods raise a `ConfigError` that names the key if its value does not
    have the type that they read.
    """

    def __init__(self, files: Checkpoint, *parts: str) -> None:
        """Take the config.json that `files` has read. `parts`: names of objects in it in which the keys are looked up
        as well.
        """
        self.files = files
        self.config = files.config
        self.refusal = files.refusal
        self._places = [files.config, *(files.part(part) for part in parts)]

    def get(self, *names: str) -> Any:
        """Return the value of the key that is stored under any of these alternative names; None if there is none.
        Raises `ConfigError` if two of them have different values.
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

    def number(self, *names: str, min_value: int, max_value: int = MAX_NUMBER) -> int:
        """Return the value of the key that is stored under any of these alternative names. Raises `ConfigError` if
        there is none, or unless it is a whole number from `min_value` to `max_value`.
        """
        value = self.get(*names)
        if type(value) is not int or not min_value <= value <= max_value:
            what = f"is {value!r}, must be a whole number from {min_value} to {max_value}; correct its config.json"
            found = [name for name in names if self.get(name) is not None]
            raise self.refusal(what, of=" or ".join(found or names))
        return value

    def flag(self, name: str) -> bool | None:
        """Return the boolean value of the key with this name; None if there is no such key. Raises `ConfigError` if the
        value is not a boolean.
        """
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.refusal(f"is {value!r}, must be true or false", of=name)
        return value
