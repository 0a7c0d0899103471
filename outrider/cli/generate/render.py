"""Prints an output with its tokens coloured by kind, as in Figure 1 of Leviathan et al. (2023), and a summary of it."""

from __future__ import annotations

from collections import deque

from rich.console import Console
from rich.text import Text

from outrider.cli.console import visible
from outrider.client import Client, Round, TokenKind, Usage

STYLES = {
    TokenKind.ACCEPTED: "green",
    TokenKind.RECOVERED: "blue",
    TokenKind.BONUS: "default",
    TokenKind.PLAIN: "dim",
    TokenKind.FORCED: "cyan",
    TokenKind.PREDICTED: "magenta",
}
_FRAGMENT = "\ufffd"
"""Character that stands for a part of a UTF-8 character in the text of a token."""


def legend() -> Text:
    """Return the names of the token kinds, each in the colour in which its tokens are printed."""
    text = Text("tokens: ")
    for kind, style in STYLES.items():
        text.append(f"{kind.value} ", style)
    return text


def served_ids(client: Client) -> str:
    """Return the ids of the models that the gateway serves, separated by commas."""
    return ", ".join(model.id for model in client.models())


class KindPainter:
    """Assigns to each character in the text deltas of an output the kind of the token that it comes from.

    The text of a round's tokens and its text delta differ: a character may take several tokens, and text that may begin
    a stop string is held back. Every character of every delta is returned once, in order. The kind is a guess where a
    token's text is not found in the delta.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[TokenKind, str]] = deque()
        self._last = TokenKind.PLAIN

    def paint(self, round_: Round) -> list[tuple[TokenKind, str]]:
        """Split `round_.text_delta` by token kind. Return pieces (kind, text) whose texts join to the delta."""
        self._pending.extend((token.kind, token.text) for token in round_.tokens)
        rest = round_.text_delta
        spans = []
        while rest and self._pending:
            self._last, text = self._pending.popleft()
            size = self._size_in(rest, text)
            if text.startswith(rest) and len(text) > len(rest):  # the rest of this token is still held back
                self._pending.appendleft((self._last, text[len(rest) :]))
            spans.append((self._last, rest[:size]))
            rest = rest[size:]
        spans.append((self._last, rest))
        return [(kind, text) for kind, text in spans if text]

    def _size_in(self, remaining: str, text: str) -> int:
        """Return the number of characters at the start of `remaining` that come from a token with the text `text`."""
        if remaining.startswith(text):
            return len(text)
        if text.startswith(remaining):
            return len(remaining)
        # A piece of a character, or a token that shows differently here: its part ends where the next whole one starts.
        for _, following in self._pending:
            if following and _FRAGMENT not in following:
                position = remaining.find(following)
                if position >= 0:
                    return position
                break
        return len(remaining)


class AnswerPrinter:
    """Prints the text of rounds as they arrive. On a terminal it is coloured and control characters are visible;
    elsewhere it is printed unchanged.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._painter = KindPainter()
        self._at_line_start = True

    def show(self, round_: Round) -> None:
        """Print the text of a round."""
        if not round_.text_delta:
            return
        self._at_line_start = round_.text_delta.endswith("\n")
        if self._console.is_terminal:
            coloured = Text()
            for kind, text in self._painter.paint(round_):
                coloured.append(visible(text), STYLES[kind])
            self._console.print(coloured, end="")
        else:
            self._console.file.write(round_.text_delta)
        self._console.file.flush()

    def end(self) -> None:
        """End the printed line, unless the text ended with a newline."""
        if not self._at_line_start:
            self._console.file.write("\n")
            self._console.file.flush()


def summary(usage: Usage, elapsed_s: float, first_token_s: float) -> str:
    """Return two lines of text on an output: its tokens and speed, and its speculation.

    elapsed_s, first_token_s: seconds from the call to the last and to the first token, measured by the client.
    """
    made = (
        f"{usage.num_completion_tokens} tokens in {elapsed_s:.2f} s, "
        f"{usage.num_completion_tokens / elapsed_s:.1f} tokens/s, first after {first_token_s * 1000:.0f} ms"
    )
    rounds = f"{usage.num_rounds} rounds, {usage.num_plain_steps} plain steps"
    per_pass = tokens_per_pass(usage)
    if usage.acceptance_rate is None:
        return f"{made}\n{rounds}, {per_pass}\n{usage.describe()}"
    return f"{made}\n{rounds}, {usage.describe()}, {per_pass}"


def tokens_per_pass(usage: Usage) -> str:
    """Return a text with the output tokens per step of the target, and with the lenience if the output is not exact."""
    text = f"{figure(usage.tokens_per_target_pass)} tokens per target pass"
    if usage.lenience is not None and usage.num_draft_tokens:
        text += f"; not exact: lenience {usage.lenience:g}"
    return text


def figure(value: float | None) -> str:
    """Return a number as text, or "none" if it is None."""
    if value is None:
        return "none"
    return f"{value:.2f}"
