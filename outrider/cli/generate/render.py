"""Shows an answer with its tokens coloured by kind, after Leviathan et al. 2023, Figure 1, and sums it up."""

from __future__ import annotations

from collections import deque

from rich.console import Console
from rich.text import Text

from outrider.cli.console import visible
from outrider.client import Round, TokenKind, Usage

STYLES = {
    TokenKind.ACCEPTED: "green",
    TokenKind.RECOVERED: "blue",
    TokenKind.BONUS: "default",
    TokenKind.PLAIN: "dim",
    TokenKind.FORCED: "cyan",
    TokenKind.PREDICTED: "magenta",
}
_FRAGMENT = "\ufffd"


def legend() -> Text:
    parts = [(f"{kind.value} ", style) for kind, style in STYLES.items()]
    return Text.assemble("tokens: ", *parts)


class KindPainter:
    """Lays the tokens' kinds over the text deltas of one answer.

    The two do not line up by themselves: a character may take several tokens, and text that may be the start of a
    stop string is held back. Every character of every delta comes out once, in order; only its colour is inferred.
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
        following = next((other for _, other in self._pending if other and _FRAGMENT not in other), None)
        position = rest.find(following) if following is not None else -1
        return position if position >= 0 else len(rest)


class AnswerPrinter:
    """Writes rounds as they come. On a terminal: coloured, control characters shown; elsewhere: the exact text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._painter = KindPainter()
        self._at_line_start = True

    def show(self, round_: Round) -> None:
        if not round_.text_delta:
            return
        self._at_line_start = round_.text_delta.endswith("\n")
        if self._console.is_terminal:
            spans = [(visible(text), STYLES[kind]) for kind, text in self._painter.paint(round_)]
            self._console.print(Text.assemble(*spans), end="")
        else:
            self._console.file.write(round_.text_delta)
        self._console.file.flush()

    def end(self) -> None:
        """End the line if the text did not, so that what follows starts on its own."""
        if not self._at_line_start:
            self._console.file.write("\n")
            self._console.file.flush()


def summary(usage: Usage, elapsed_s: float, first_token_s: float) -> str:
    """Return two lines: what was made and how fast; what speculation did. Seconds are the client's."""
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
    """Return tokens per target pass, with the mark of an answer that is not exact."""
    mark = f"; not exact: lenience {usage.lenience:g}" if usage.lenience is not None and usage.num_draft_tokens else ""
    return f"{figure(usage.tokens_per_target_pass)} tokens per target pass{mark}"


def figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
