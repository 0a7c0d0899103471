"""The bodies of /v1/completions and /v1/chat/completions.

/openapi.json and the tables of docs/openai.md are made from these models. Fields that both share are in
`shared_fields.py`. The bodies of the layers over chat (`layers.py`) are converted to a ChatBody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from gateway.admission.prompts import Chat
from gateway.admission.request_checks import MAX_MESSAGES
from gateway.admission.unchecked_request import FieldNames, Infill, UncheckedRequest
from gateway.api.schemas.base import described
from gateway.api.schemas.field_types import is_list_of
from gateway.api.schemas.messages import AnyTool, MessageBody
from gateway.api.schemas.shared_fields import DEFAULT_MAX_TOKENS, SharedFields
from gateway.confined.template_shape import Message, text_of_content
from gateway.tools.offer import MAX_LISTED_TOOLS, ToolOffer, offer_of
from gateway.tools.reading import ReasoningBudget
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import CHOICES, LOGPROBS, RANGES, Range
from outrider.wire.settings.config import ContentControlTokens

MAX_THINKING_TOKENS = RANGES["max_tokens"].high
"""Maximal value of a budget of reasoning tokens."""
THINKING_TOKEN_BUDGET = Range(-1, MAX_THINKING_TOKENS, remedy="; -1 is any number of tokens")
MAX_PROMPTS = 4096
"""Maximal number of prompts in one request."""


def read_prompts(value: Any) -> list[str | tuple[int, ...]]:
    """Return the prompts in the field `prompt`: a text, token ids, or a list of either.

    Raises ValueError for any other value. `[]` and `[[]]` pass, and are refused later as empty.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _no_prompts()
    if len(value) > MAX_PROMPTS and type(value[0]) is not int:
        raise ValueError(f"has {len(value)} prompts, at most {MAX_PROMPTS} are read; split the request")
    if is_list_of(value, str):
        return list(value)
    if is_list_of(value, int):
        return [tuple(value)]
    for prompt in value:
        if not is_list_of(prompt, int):
            raise _no_prompts()
    return [tuple(prompt) for prompt in value]


def _no_prompts() -> ValueError:
    return ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


Prompts = Annotated[
    list[Any], BeforeValidator(read_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


class NamedFunction(TypedDict):
    name: str


class NamedTool(TypedDict):
    type: Literal["function"]
    function: NamedFunction


def read_tool_choice(value: Any) -> str | tuple[str]:
    """Return the value of the field `tool_choice`: a word such as "auto", or `(name,)` if the value names a tool.

    Raises ValueError for any other value.
    """
    if value in ("none", "auto", "required"):
        return str(value)
    name = _name_of_function(value)
    if name is None:
        raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": NAME}}')
    return (name,)


def _name_of_function(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") != "function":
        return None
    function = value.get("function")
    if not isinstance(function, dict):
        return None
    name = function.get("name")
    if not isinstance(name, str):
        return None
    return name


class CompletionBody(SharedFields):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists. Choice *i* of prompt "
        f"*p* has index *p · n + i*. At most {MAX_PROMPTS} prompts, and no more answers than `--max-running` for each "
        "target and `--max-queue` together"
    )
    logprobs: int | None = described(
        "best tokens besides the chosen one, of the target's unmodified distribution. Default: none", LOGPROBS
    )
    max_tokens: int | None = described(
        "0 makes no output, and needs room for one token: for `echo` and `prompt_logprobs`. More than the context "
        "leaves means what it leaves, unless the gateway was started with `--max-tokens-beyond-context refuse`. "
        f"Default: {DEFAULT_MAX_TOKENS}",
        minimum=0,
    )
    suffix: str | None = described(
        "what follows the answer, where the tokenizer has tokens for filling in the middle; prompts are then texts. "
        "Default: none"
    )
    echo: bool | None = described(
        "the prompt in front of each answer; with `logprobs` its tokens, but the first, have them, too. Default: false"
    )
    best_of: int | None = described(
        "at least `n`: so many are made, and the `n` of the highest log-prob a token are told; not of a stream. "
        "Default: `n`",
        **CHOICES.schema,
    )

    @property
    def num_made(self) -> int:
        """Number of choices that are generated for each prompt. The response has only the best `n` of them."""
        if self.best_of is None:
            return self.n or 1
        return self.best_of

    @property
    def num_echoed_logprobs(self) -> int | None:
        """Number of most likely tokens to return, with log-probs, for each token of an echoed prompt.

        None if the request has no `echo` or no `logprobs`: the prompt's tokens then have no log-probs.
        """
        if self.echo:
            return self.logprobs
        return None

    def unchecked_request(self, request_id: str) -> UncheckedRequest:
        """Return the request, not yet tokenized, for these completions.

        Raises InvalidRequest for fields that contradict each other.
        """
        self._check_choices()
        max_tokens = DEFAULT_MAX_TOKENS
        if self.max_tokens is not None:
            max_tokens = self.max_tokens
        num_logprobs = self.logprobs
        if num_logprobs is None and self.num_made > self.num_choices:
            num_logprobs = 0  # choices are ranked by their log-probs
        names = FieldNames(prompt="prompt", prediction="prediction.content", num_choices=self._choices_field)
        unchecked = self._unchecked_request(request_id, names, self._prompts(), max_tokens or 1, num_logprobs)
        return replace(
            unchecked,
            num_choices=self.num_made,
            num_prompt_logprobs=self._num_prompt_logprobs(),
            is_empty=max_tokens == 0,
        )

    def _check_choices(self) -> None:
        n = self.num_choices
        if self.num_made < n:
            raise InvalidRequest(f"best_of is {self.best_of}, must be at least n, {n}", param="best_of")
        if self.num_made > n and (self.stream or self.use_beam_search):
            other = "stream" if self.stream else "use_beam_search"
            text = f"best_of is {self.best_of} and n is {n}, which does not go together with {other}; leave one out"
            raise InvalidRequest(text, param="best_of")
        if self.stream and self.num_echoed_logprobs is not None and self.num_made > 1:
            text = f"n is {n}, which does not go together with echo, logprobs and stream; leave one out"
            raise InvalidRequest(text, param="n")

    @property
    def _choices_field(self) -> str:
        if self.best_of is None:
            return "n"
        return "best_of"

    def _num_prompt_logprobs(self) -> int | None:
        numbers = (self.num_echoed_logprobs, self.prompt_logprobs)
        return max((number for number in numbers if number is not None), default=None)

    def _prompts(self) -> tuple[Any, ...]:
        if not self.suffix:
            return tuple(self.prompt)
        if not is_list_of(self.prompt, str):
            raise InvalidRequest("suffix needs prompts that are texts, not tokens; leave it out", param="suffix")
        return tuple(Infill(prompt, self.suffix) for prompt in self.prompt)


class ChatBody(SharedFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description=f"at most {MAX_MESSAGES}; roles system, developer, user, assistant, tool, and those that the chat "
        "template names; `content` a string or a list of text parts (see [below](#messages)); `name`; of an assistant "
        "`tool_calls` and `reasoning_content`; of a tool `tool_call_id`. developer becomes system where the template "
        "does not know it. Other fields of a message are ignored"
    )
    max_completion_tokens: int | None = described(
        "the same as `max_tokens`, which it must equal when both are given", minimum=1
    )
    logprobs: bool | None = described("whether tokens have log-probs, of the target's unmodified distribution")
    top_logprobs: int | None = described("needs `logprobs`. Default: 0", LOGPROBS)
    add_generation_prompt: bool | None = described("passed to the chat template. Default: true")
    continue_final_message: bool | None = described(
        "the answer goes on with the assistant's last message; needs `add_generation_prompt` to be false. Default: "
        "false"
    )
    chat_template_kwargs: dict[str, Any] | None = described(
        "more variables for the chat template, such as `enable_thinking`"
    )
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = described(
        "objects with `title` and `text`, for a chat template that has a place for them; without one they are refused. "
        "Default: none"
    )
    tools: Annotated[list[AnyTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described(
        "functions of different names, at most `--max-tools`, of `--max-tools-bytes` in all; the chat template must "
        "take tools, see [below](#tools). Tools of other types are left out"
    )
    tool_choice: (
        Annotated[
            Any,
            BeforeValidator(read_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
        ]
        | None
    ) = described('none, auto, required, or `{"type": "function", "function": {"name": NAME}}`. Default: auto')
    parallel_tool_calls: bool | None = described("whether an answer may hold several calls. Default: true")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = described(
        "none, minimal, low, medium, high or xhigh: passed to the chat template"
    )
    thinking_token_budget: int | None = described(
        "tokens of reasoning after which its end is forced; -1 = any number. Also passed to the chat template, as "
        "`thinking_budget`. Refused for a model whose reasoning does not begin and end with tokens of their own. "
        "Default: any number",
        THINKING_TOKEN_BUDGET,
    )

    control_tokens_in_content: ContentControlTokens | None = described(
        "allow, or text: control tokens in messages, calls, tools and documents are text like any other, and only "
        "the template's own are tokens. Default: as the API key and the gateway have it, who allow them unless they "
        "say text"
    )
    stop_in_reasoning: bool | None = described(
        "stops end the answer inside its reasoning, too. Default: false, they wait for its end, but for ids of special "
        "tokens"
    )

    def unchecked_request(self, request_id: str) -> UncheckedRequest:
        """Return the request, not yet tokenized, for the choices of this chat.

        Raises InvalidRequest for fields that are too long or contradict each other.
        """
        self._check_lengths()
        messages = tuple(message.message() for message in self.messages)
        variables = dict(self.chat_template_kwargs or {})
        documents = _documents(self.documents, variables)
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, **variables}
        budget = self._reasoning_budget()
        if budget is not None:
            variables = {"thinking_budget": budget.num_tokens, **variables}
        tools = self._tool_offer()
        if self.continue_final_message:
            tools = replace(tools, continued_text=self._continued_text(messages))
        chat = Chat(
            messages,
            self.add_generation_prompt is not False,
            variables,
            tools,
            bool(self.continue_final_message),
            documents,
            control_tokens=self.control_tokens_in_content,
            reasoning_budget=budget,
        )
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        num_logprobs = None
        if self.logprobs:
            num_logprobs = self.top_logprobs or 0
        unchecked = self._unchecked_request(request_id, self._field_names(), (chat,), max_tokens, num_logprobs)
        return replace(unchecked, stops_in_reasoning=bool(self.stop_in_reasoning))

    def _check_lengths(self) -> None:
        old = self.max_tokens
        new = self.max_completion_tokens
        if old is not None and new not in (None, old):
            text = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise InvalidRequest(text, param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")

    def _reasoning_budget(self) -> ReasoningBudget | None:
        num_tokens = self.thinking_token_budget
        if num_tokens is None:
            return None
        THINKING_TOKEN_BUDGET.check("thinking_token_budget", num_tokens)
        if num_tokens == -1:
            return None
        return ReasoningBudget(num_tokens)

    def _field_names(self) -> FieldNames:
        max_tokens = "max_completion_tokens"
        if self.max_completion_tokens is None:
            max_tokens = "max_tokens"
        return FieldNames(
            prompt="messages", prediction="prediction.content", max_tokens=max_tokens, num_logprobs="top_logprobs"
        )

    def _tool_offer(self) -> ToolOffer:
        tools = []
        for index, body in enumerate(self.tools or ()):
            tool = body.tool(index)
            if tool is not None:
                tools.append(tool)
        return offer_of(tools, self.tool_choice, self.parallel_tool_calls)

    def _continued_text(self, messages: tuple[Message, ...]) -> str:
        last = messages[-1]
        if self.add_generation_prompt is not False or last["role"] != "assistant":
            text = "continue_final_message needs add_generation_prompt to be false and a last message of the assistant"
            raise InvalidRequest(text, param="continue_final_message")
        return text_of_content(last["content"])


def _documents(given: list[dict[str, Any]] | None, variables: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the documents, which may also come as a variable of the template: that one is taken from `variables`."""
    variable = variables.pop("documents", None)
    if variable and given and variable != given:
        text = "documents and chat_template_kwargs.documents are different; give one of them"
        raise InvalidRequest(text, param="documents")
    documents = given or variable or []
    if not is_list_of(documents, dict):
        text = 'chat_template_kwargs.documents must be a list of objects such as {"title": ..., "text": ...}'
        raise InvalidRequest(text, param="chat_template_kwargs")
    return tuple(documents)
