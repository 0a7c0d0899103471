"""Prints an output with its tokens coloured by kind, as Figure 1 of Leviathan et al. (2023), and sums it up."""

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
"""Text of a piece of a character in a token's own text."""


def legend() -> Text:
    """Return the names of the kinds in their colours."""
    text = Text("tokens: ")
    for kind, style in STYLES.items():
        text.append(f"{kind.value} ", style)
    return text


def served_ids(client: Client) -> str:
    """Return the ids of the served models."""
    return ", ".join(model.id for model in client.models())


class KindPainter:
    """Assigns the kinds of one output's tokens to the characters of its text deltas.

    Tokens and deltas differ in length: a character may take several tokens, and text that may begin a stop string is
    held back. Every character of every delta comes out once, in order; only its kind is inferred.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[TokenKind, str]] = deque()
        self._last = TokenKind.PLAIN

    def paint(self, round_: Round) -> list[tuple[TokenKind, str]]:
        """Return [(kind, text)] whose texts join to `round_.text_delta`."""
        self._pending.extend((token.kind, token.text) for token in round_.tokens)
        rest, spans = round_.text_delta, []
        while rest and self._pending:
            self._last, text = self._pending.popleft()
            size = self._size_in(rest, text)
            if text.startswith(rest) and len(text) > len(rest):  # the rest of this token is still held back
                self._pending.appendleft((self._last, text[len(rest) :]))
            spans.append((self._last, rest[:size]))
            rest = rest[size:]
        spans.append((self._last, rest))
        return [(kind, text) for kind, text in spans if text]

    def _size_in(self, rest: str, text: str) -> int:
        """Return how many characters at the start of `rest` come from a token with this text."""
        if rest.startswith(text):
            return len(text)
        if text.startswith(rest):
            return len(rest)
        # A piece of a character, or a token that shows differently here: its part ends where the next whole one starts.
        for _, following in self._pending:
            if following and _FRAGMENT not in following:
                position = rest.find(following)
                if position >= 0:
                    return position
                break
        return len(rest)


class AnswerPrinter:
    """Prints rounds as they come: on a terminal coloured and with visible control characters, elsewhere as they are."""

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
        """End the line where the text did not."""
        if not self._at_line_start:
            self._console.file.write("\n")
            self._console.file.flush()


def summary(usage: Usage, elapsed_s: float, first_token_s: float) -> str:
    """Return two lines on an output: its tokens and speed, by the client's clock, and its speculation."""
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
    """Return the tokens per step of the target as text, and the lenience of an output that is not exact."""
    text = f"{figure(usage.tokens_per_target_pass)} tokens per target pass"
    if usage.lenience is not None and usage.num_draft_tokens:
        text += f"; not exact: lenience {usage.lenience:g}"
    return text


def figure(value: float | None) -> str:
    """Return a number as text; "none" for None."""
    if value is None:
        return "none"
    return f"{value:.2f}"
