"""`outrider chat`: a conversation in the terminal. The history lives here, not in the server."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer

from outrider.cli import options as opt
from outrider.cli.console import EXIT_FAILED, answer_console, errors_as_lines, note_console, print_error
from outrider.cli.generate.render import AnswerPrinter, legend, served_ids, tokens_per_pass
from outrider.client import Client, GenerateOptions, InvalidRequest, Message, OutriderError, Usage
from outrider.client.aio import DEFAULT_ADDRESS


@opt.grouped
def chat(
    address: opt.Address = DEFAULT_ADDRESS,
    system: str | None = typer.Option(None, help="A system message to begin with."),
    max_tokens: opt.MaxTokens = 256,
    *,
    generation: opt.Generation,
    connection: opt.CallOptions,
) -> None:
    """Chat with the model. /reset clears the history, /quit or Ctrl-D ends the chat, Ctrl-C stops an answer."""
    with errors_as_lines():
        options = generation.options(connection.model, max_tokens)
        with Client(address, timeout_s=connection.timeout, **connection.options) as client:
            served = served_ids(client)  # an absent server is noticed before typing
            conversation = Conversation(client, options, system)
            note_console().print(f"{served} at {address}. /reset forgets, /quit leaves, Ctrl-C stops an answer.")
            last_answered = _loop(conversation)
    if not last_answered:
        raise typer.Exit(EXIT_FAILED)


def _loop(conversation: Conversation) -> bool:
    """Read lines and answer each until /quit or the end of input. Return whether the last message was answered."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  editing and recall, by being imported
        note_console().print(legend())
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
    answered = True
    while True:
        try:
            line = input(prompt).strip()
        except KeyboardInterrupt:  # drops the line; Ctrl-D leaves
            typer.echo(err=True)
            continue
        except EOFError:
            return answered
        if line == "/quit":
            return answered
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print_error(f"{line} is no command; there are /reset and /quit")
        elif line:
            answered = conversation.send(line)


class Conversation:
    """The messages of a chat so far. A user's message is added only together with its answer, so that the user can send
    it again after a failed request.
    """

    def __init__(self, client: Client, options: GenerateOptions, system: str | None) -> None:
        self._client = client
        self._options = options
        self._first = list[Message]()
        if system is not None:
            self._first.append({"role": "system", "content": system})
        self._messages = list(self._first)

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self._messages = list(self._first)

    def send(self, text: str) -> bool:
        """Send a message of the user and print the answer. If the request fails, print the error. Return whether there
        was an answer.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = self._answer(messages)
        except InvalidRequest as error:
            print_error(f"{error.message} (/reset starts again)")
            return False
        except OutriderError as error:
            print_error(error.message)
            return False
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]
        return True

    def _answer(self, messages: list[Message]) -> str:
        """Print and return the answer to the messages. Ctrl-C cancels the rest of it."""
        printer = AnswerPrinter(answer_console())
        options: GenerateOptions = {**self._options, "messages": messages}
        parts: list[str] = []
        usage: Usage | None = None
        try:
            with self._client.stream(**options) as rounds:
                for round_ in rounds:
                    parts.append(round_.text_delta)  # first: Ctrl-C may come while it is shown
                    printer.show(round_)
                    usage = round_.usage or usage
        except KeyboardInterrupt:
            pass
        finally:
            printer.end()
        if usage is not None:
            note_console().print(f"{usage.describe()}, {tokens_per_pass(usage)}", style="dim")
        return "".join(parts)
