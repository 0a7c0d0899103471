"""Turns prompts of any kind into token ids, and builds the grammar of their outputs. `build_requests` calls it."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.admission.prompts import Chat, PromptReader
from gateway.admission.unchecked_request import Infill, Prompt
from gateway.grammar_checker import GrammarChecker
from gateway.infill import infill_ids
from gateway.output_format import OutputFormat
from gateway.tokenizer import Tokenizer
from gateway.tools.offer import ToolOffer
from gateway.tools.reading import Reading, grammar_request, reading_of
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class CallerGrammars:
    """Builds and checks the grammars of one caller's requests."""

    checker: GrammarChecker
    caller: bytes
    """Digest of the caller's API key, empty without one. By it, the processes that check grammars are divided fairly
    between callers."""

    async def output(self, output: OutputFormat | None) -> str:
        """Return the grammar of an output format, as JSON for llguidance; empty if `output` is None: any text.

        Raises InvalidRequest if the format cannot be enforced.
        """
        if output is None:
            return ""
        return await self.checker.output(self.caller, output)

    async def tools(self, offer: ToolOffer, reading: Reading, tokenizer: Tokenizer, answer: str) -> str:
        """Return the grammar of an output that may call the offered tools, as JSON for llguidance.

        reading: parser of tool calls and reasoning in the output. answer: grammar of the outputs that call no tool;
        empty for any text. Raises InvalidRequest if it cannot be enforced or is too large.
        """
        request = grammar_request(offer, reading, tokenizer, answer)
        if request is None:
            return answer
        return await self.checker.tools(self.caller, request)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as token ids, with the grammar and the parser of its outputs."""

    ids: tuple[int, ...]
    """Token ids of the whole prompt, at least one."""
    grammar: str
    """Grammar that the outputs must follow, as JSON for llguidance; empty for any text."""
    reading: Reading | None = None
    """Parser of tool calls and reasoning in the output text; None to leave the text as it is."""


async def prepare_prompt(
    prompt: Prompt,
    reader: PromptReader,
    name: str,
    grammars: CallerGrammars,
    grammar: str,
    adds_special: bool | None = None,
    max_ids: int | None = None,
) -> PreparedPrompt:
    """Render and tokenise a prompt, and build the grammar of its outputs.

    name: name of the prompt's field, for errors. grammars: makes the grammar of a chat's tools. grammar: grammar of the
    output format, empty for any text. adds_special: whether the tokenizer adds its own special tokens; None to add them
    to texts but not to chats. max_ids: number of token ids to use, counted from the end of the prompt; None for all.

    Raises InvalidRequest, and ContextExceeded for a prompt that does not fit the context.
    """
    if isinstance(prompt, Chat):
        prepared = await _prepare_chat(prompt, reader, name, grammars, grammar, bool(adds_special), max_ids)
    elif isinstance(prompt, Infill):
        before, between, behind = infill_ids(reader.tokenizer)
        begin = reader.tokenizer.encode("")  # what the tokenizer puts in front of every text
        first = await reader.encode(name, prompt.prefix, False)
        last = await reader.encode("suffix", prompt.suffix, False)
        prepared = PreparedPrompt((*begin, before, *first, between, *last, behind), grammar)
    elif isinstance(prompt, str):
        prepared = PreparedPrompt(await reader.encode(name, prompt, adds_special is not False, max_ids), grammar)
    elif max_ids is None:
        prepared = PreparedPrompt(prompt, grammar)
    else:
        prepared = PreparedPrompt(prompt[-max_ids:], grammar)
    if not prepared.ids:
        raise InvalidRequest(f"{name} is empty: at least one token is needed to continue from", param=name)
    return prepared


async def _prepare_chat(
    chat: Chat,
    reader: PromptReader,
    name: str,
    grammars: CallerGrammars,
    grammar: str,
    adds_special: bool,
    max_ids: int | None,
) -> PreparedPrompt:
    pieces = await reader.render_pieces(name, chat, is_cut=max_ids is not None)
    reading: Reading | None = None
    ids = await reader.encode_chat(name, pieces, adds_special, max_ids)
    if chat.tools is not None:
        reading = reading_of(chat.tools, reader.tokenizer, pieces[-1], chat.reasoning_budget)
        if reading is not None:
            grammar = await grammars.tools(chat.tools, reading, reader.tokenizer, grammar)
    return PreparedPrompt(ids, grammar, reading)
