"""Keeps users' text from being tokenised as control tokens (setting `control_tokens_in_content`). Pure.

Where a user's text spells a control token, random digits (the separator) are inserted after its first character. The
template copies them into its output, which is cut there before it is tokenised. So both halves are tokenised as text,
while the control tokens that the template itself writes stay control tokens.

    # content "a<eos>" becomes "a<0123eos>", and the rendered text is cut to "...a<" and "eos>..."
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.confined.template_shape import Message
from gateway.text_trie import trie_pattern

SEPARATOR_DIGITS = 16
"""Number of random digits of the separator that is inserted into control tokens of users' texts, so many that nobody
can guess it. Only digits are safe: templates may change the case of letters, and JSON escapes other characters."""
WORDS = frozenset({"role", "type"})
"""Names of fields of messages and tools whose values a template compares with fixed words. In these values, and in
all names of fields, only whole control tokens are cut, so that they are tokenised as text. Other texts are also cut if
they begin or end with a part of a control token, which the text around them may complete."""


class ControlTokens:
    """The texts of one tokenizer's control tokens, and the search for them in a user's text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = [text for text in texts if len(text) > 1]  # a single character cannot be cut
        self._pattern = trie_pattern(self._texts)
        self._max_chars = max(map(len, self._texts), default=0)
        self._joined = "\0".join(self._texts)
        self._begins = set[str]()
        """Proper prefixes of control tokens: "<", "<e", "<eo", "<eos" of "<eos>"."""
        self._ends = set[str]()
        """Proper suffixes of control tokens: "eos>", "os>", "s>", ">" of "<eos>"."""
        for text in self._texts:
            for size in range(1, len(text)):
                self._begins.add(text[:size])
                self._ends.add(text[size:])

    def positions_within(self, text: str) -> list[int]:
        """Return for each control token in the text the position after its first character, in ascending order.

        # "ab<eos>": [3]
        """
        if self._pattern is None:
            return []
        return [match.start() + 1 for match in self._pattern.finditer(text)]

    def positions(self, text: str) -> list[int]:
        """Return the positions, ascending, at which to cut a text so that neither the text alone nor the text together
        with the template's text around it spells a control token.

        These are the positions of `positions_within`. If the text ends with the beginning of a control token, it is
        also cut after that token's first character. If the text begins with the end of one, it is also cut at 0.

            # "os>ab<e": [0, 6]
        """
        positions = set(self.positions_within(text))
        for at in range(max(0, len(text) - self._max_chars), len(text)):
            if text[at:] in self._begins:
                positions.add(at + 1)
        if text and self._may_begin_inside(text):
            positions.add(0)
        return sorted(positions)

    def _may_begin_inside(self, text: str) -> bool:
        if len(text) < self._max_chars and text in self._joined:
            return True
        return any(text[:size] in self._ends for size in range(1, self._max_chars))


class ControlTokenSplitter:
    """Inserts a separator, a random number, into the control tokens that a request's texts spell.

    The rendered chat is cut at the separators before it is tokenised. Each control token is then in two pieces, which
    are tokenised as text.
    """

    def __init__(self, tokens: ControlTokens) -> None:
        self._tokens = tokens
        self.separator = f"{secrets.randbelow(10**SEPARATOR_DIGITS):0{SEPARATOR_DIGITS}d}"
        self.num_separators = 0

    def message(self, message: Message) -> Message:
        """Return a copy of the message in which a random number, the separator, is inserted into each control token
        that its texts spell. The rendered chat is later cut there, so that the token is read as text.

        It is inserted in all texts that a template may write, such as contents, names and arguments of calls.
        """
        return {name: self._field(name, value) for name, value in message.items()}

    def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], documents: Sequence[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]], list[dict[str, Any]]]:
        """Return copies of messages, tools and documents in which a random number, the separator, is inserted into each
        control token that their texts spell. The rendered chat is later cut there, so that the token is read as text.

        Raises RecursionError if they nest too deep.
        """
        return list(map(self.message, messages)), self.values(tools), self.values(documents)

    def values(self, values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of tools or documents in which a random number, the separator, is inserted into each control
        token that their texts spell, so that the token is later read as text.
        """
        return list(map(self._split, values))

    def _split(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list | tuple):
            return list(map(self._split, value))
        if isinstance(value, dict):
            return {self._word(name): self._field(name, child) for name, child in value.items()}
        return value

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and name in WORDS:
            return self._word(value)
        if isinstance(value, str) and name == "arguments":
            return self._arguments(value)
        return self._split(value)

    def _arguments(self, text: str) -> str:
        # A call's arguments are JSON, in which a control token may be written with escapes.
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self._text(text)
        num_before = self.num_separators
        split = self._split(value)
        if self.num_separators == num_before:
            return text
        return json.dumps(split, ensure_ascii=False)

    def _word(self, text: str) -> str:
        return self._cut(text, self._tokens.positions_within(text))

    def _text(self, text: str) -> str:
        return self._cut(text, self._tokens.positions(text))

    def _cut(self, text: str, positions: list[int]) -> str:
        parts: list[str] = []
        begin = 0
        for position in positions:
            parts += [text[begin:position], self.separator]
            begin = position
            self.num_separators += 1
        parts.append(text[begin:])
        return "".join(parts)
