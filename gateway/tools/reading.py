"""How the outputs of one chat are read for calls and reasoning, and which grammar that needs.

`gateway.admission.requests` calls both functions, when the prompt of the chat is rendered.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import CallFamily, CallIds
from gateway.tools.cursor import MARKER
from gateway.tools.forms.form import Schemas
from gateway.tools.grammar_request import ToolGrammarRequest, binds_answer, markers
from gateway.tools.offer import NO_PARAMETERS, ToolOffer
from gateway.tools.reader import CallReader
from gateway.tools.reasoning import Marks, ReasoningFamily
from gateway.tools.recognition import families_of
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Reading:
    """Rules by which the outputs of one prompt are split into reasoning, content and tool calls."""

    family: CallFamily | None
    """How the model writes tool calls. None = calls are not looked for."""
    schemas: Schemas
    """The JSON Schema of each tool's arguments, by the name of the tool."""
    reasoning: ReasoningFamily | None
    """How the model writes its reasoning. None = reasoning is not looked for."""
    in_reasoning: bool
    """Whether the prompt ends inside the reasoning. An output then begins inside it."""
    max_calls: int | None
    """Maximum number of calls in an output; the text behind them is dropped. None = any number."""
    shown_ids: frozenset[int]
    """Ids of special tokens that detokenization keeps in the text, because calls and reasoning are found by them."""
    silent: tuple[str, ...] = ()
    """Texts outside reasoning and calls that are dropped from an output, such as tags around the answer."""
    num_previous_calls: int = 0
    """Number of tool calls in the prompt. 0 for a family that does not number the calls of a chat."""
    max_reasoning_tokens: int | None = None
    """Maximum number of tokens of reasoning; a grammar then forces the text that ends it. None = any number."""

    @property
    def marks(self) -> Marks | None:
        """The texts that begin and end the reasoning. None = reasoning is not looked for."""
        if self.reasoning is None:
            return None
        return self.reasoning.marks

    @property
    def bounds_reasoning(self) -> bool:
        """Whether outputs may have reasoning and `max_reasoning_tokens` limits its length."""
        return self.reasoning is not None and self.max_reasoning_tokens is not None

    def reader(self) -> CallReader:
        """Return a reader for one output."""
        return CallReader(
            self.family, self.schemas, self.reasoning, self.in_reasoning, self.max_calls, silent=self.silent
        )


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """A limit on the length of the reasoning in one output."""

    num_tokens: int
    """Maximum number of tokens between the texts that begin and end the reasoning."""
    is_optional: bool = False
    """Whether the limit is ignored for a model whose reasoning no grammar can end. False = the request is refused."""


def reading_of(
    offer: ToolOffer, tokenizer: Tokenizer, prompt: str, budget: ReasoningBudget | None = None
) -> Reading | None:
    """Return how the outputs of a chat are split into reasoning, content and calls. None = they are content as a whole.

    `offer`: the tools that the model may call. `prompt`: the rendered chat. `budget`: limit of the reasoning; None = no
    limit. Raises InvalidRequest if the chat template takes no tools, if it writes calls in an unknown form, and for a
    `budget` that is not optional and cannot be enforced for this model.
    """
    template = tokenizer.template
    assert template is not None, "the prompt was written with it"
    if offer.tools and not template.accepts_tools:
        raise InvalidRequest(
            "the chat template of this model takes no tools; leave tools out, or start the gateway with "
            "--chat-template FILE, one that does",
            param="tools",
        )
    source = template.source
    if offer.tools:
        source = template.tool_source
    families = families_of(tokenizer, source)
    family = None
    silent: tuple[str, ...] = ()
    if offer.tools:
        family = families.calls
        if family is None:
            raise InvalidRequest(
                f"the chat template {template.name} writes calls with {families.unknown_tag}, a form that is not read "
                "here; leave tools out, or start the gateway with --tool-call-parser NAME, the family whose form it is",
                param="tools",
            )
        silent = family.silent
    reasoning = families.reasoning
    max_reasoning_tokens = _max_reasoning_tokens(budget, reasoning, tokenizer)
    in_reasoning = False
    if reasoning is not None:
        silent += reasoning.silent
        in_reasoning = _ends_in_reasoning(offer, prompt, reasoning.marks)
        if not in_reasoning and _is_past_reasoning(offer, prompt, reasoning.marks) and not reasoning.may_return:
            reasoning = None
    if family is None and reasoning is None and not silent:
        return None
    schemas = {tool.name: tool.parameters or NO_PARAMETERS for tool in offer.tools}
    shown_ids = _marker_ids(family, reasoning, silent, tokenizer)
    num_previous_calls = 0
    if family is not None and family.ids is CallIds.NUMBERED:
        num_previous_calls = prompt.count(family.form.texts[0].partition("functions")[0])
    return Reading(
        family,
        schemas,
        reasoning,
        in_reasoning,
        offer.max_calls,
        shown_ids,
        silent,
        num_previous_calls,
        max_reasoning_tokens,
    )


def _max_reasoning_tokens(
    budget: ReasoningBudget | None, reasoning: ReasoningFamily | None, tokenizer: Tokenizer
) -> int | None:
    """Return the limit of the reasoning. Raises InvalidRequest where its end is no token that could be forced."""
    if budget is None:
        return None
    if reasoning is not None:
        begin, end = reasoning.marks
        first = MARKER.match(begin)
        if first is not None and tokenizer.control_id(first[0]) is not None and tokenizer.control_id(end) is not None:
            return budget.num_tokens
    if budget.is_optional:
        return None
    problem = "the chat template of this model shows no reasoning"
    if reasoning is not None:
        problem = f"the reasoning of this model does not begin and end with tokens of their own ({reasoning.name})"
    raise InvalidRequest(
        f"thinking_token_budget cannot be kept: {problem}; leave it out, or limit the whole output with max_tokens",
        param="thinking_token_budget",
    )


def _ends_in_reasoning(offer: ToolOffer, prompt: str, marks: Marks) -> bool:
    begin, end = marks
    is_continued = offer.continued_text.rfind(begin) > offer.continued_text.rfind(end)
    return is_continued or prompt.rstrip().endswith(begin.rstrip())


def _is_past_reasoning(offer: ToolOffer, prompt: str, marks: Marks) -> bool:
    return bool(offer.continued_text) or prompt.rstrip().endswith(marks[1])


def _marker_ids(
    family: CallFamily | None, reasoning: ReasoningFamily | None, silent: tuple[str, ...], tokenizer: Tokenizer
) -> frozenset[int]:
    texts = {*silent}
    if reasoning is not None:
        texts.update(reasoning.marks)
    if family is not None:
        texts.update(family.texts)
    for text in tuple(texts):
        texts.update(MARKER.findall(text))
    ids = set[int]()
    for text in texts:
        token_id = tokenizer.silent_id(text)
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def grammar_request(offer: ToolOffer, reading: Reading, tokenizer: Tokenizer, answer: str) -> ToolGrammarRequest | None:
    """Return the data that determine the grammar of the whole output. None if `answer` alone or no grammar is enough.

    `offer`: the tools that the model may call. `answer`: the grammar of an answer that is not a call; empty = any text.
    """
    family = reading.family
    reasoning = reading.reasoning
    if not reading.bounds_reasoning:
        has_calls = family is not None and bool(offer.tools)
        if not binds_answer(offer, family, answer) or not (has_calls or reasoning is not None):
            return None
    token_ids = {}
    for text in sorted(markers(offer, family, reasoning)):
        token_id = tokenizer.control_id(text)
        if token_id is not None:
            token_ids[text] = token_id
    # Only what the grammar depends on: the next request of the same chat then needs the same grammar.
    tools = tuple(dataclasses.replace(tool, description=None) for tool in offer.tools)
    offer = dataclasses.replace(offer, tools=tools, continued_text="", num_bytes=0)
    family_name = None
    if family is not None:
        family_name = family.name
    reasoning_name = None
    if reasoning is not None:
        reasoning_name = reasoning.name
    return ToolGrammarRequest(
        offer, family_name, reasoning_name, reading.in_reasoning, answer, token_ids, reading.max_reasoning_tokens
    )
