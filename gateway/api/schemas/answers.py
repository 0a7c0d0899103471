"""The bodies of answers, for /openapi.json alone: `gateway.api.openai_responses` makes plain dicts of them, for speed.

A test holds the two together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(_Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int
    audio_tokens: int


class SpeculationUsage(_Answer):
    num_rounds: int = Field(description="With drafts.")
    num_plain_steps: int = Field(description="Steps without drafts.")
    plain_reason: str | None = Field(description="Why most of those had none; null = there were none.")
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    num_overrun_tokens: int
    """Of the accepted ones, those behind the end of the answer."""
    mean_emitted_length: float | None
    """Output tokens of rounds over rounds."""
    seed: int | None
    seeds: list[int] = Field(description="Of each prompt.")
    lenience: float | None = Field(description="null = the answer has exactly the target's law.")


class UsageAnswer(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    speculation: SpeculationUsage


class UsageSoFar(_Answer):
    """Of one choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(_Answer):
    """vLLM's. Rounds are steps with drafts; the bonus token is in no count."""

    mean_acceptance_length: float = Field(description="1 + accepted over rounds.")
    draft_acceptance_rate: float = Field(description="Accepted over drafted; 0 where nothing was drafted.")
    acceptance_histogram: list[int] = Field(
        description="Rounds that accepted 0, 1, ... draft tokens: num_spec_tokens + 1 entries."
    )
    acceptance_histogram_by_draft_length: dict[str, list[int]] = Field(
        description="The same for the rounds with so many draft tokens."
    )
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="Length of the longest draft that a step may have.")
    per_step_accepted: list[int] = Field(default=[], description="With speculation.metrics detailed, by round.")
    per_step_drafted: list[int] = Field(default=[], description="The same.")


class AnswerMetrics(_Answer):
    speculative_decoding: SpeculativeDecoding | None = Field(
        description="null with several answers, with beams, and where no drafts were asked for."
    )


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null of a prompt's first token.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenOfKind(_Answer):
    id: int
    text: str
    kind: Literal["accepted", "recovered", "bonus", "plain", "forced", "predicted"]


class DraftToken(_Answer):
    id: int
    text: str
    parent: int = Field(description="Index of the draft token that it follows; -1 = the last committed token.")
    accepted: bool
    kind: Literal["drawn", "guess", "forced", "predicted"]


class NamedToken(_Answer):
    id: int
    text: str


class RankedToken(NamedToken):
    logprob: float


class Rejection(_Answer):
    parent: int = Field(description="Index of the last accepted draft token; -1 = none was.")
    token: NamedToken = Field(description="What the target said instead.")
    target: list[RankedToken] = Field(description="Its best there, at most 5, under the law that it draws from.")
    draft_law: list[RankedToken] | None = Field(description="The best of the law that the draft drew from, at most 5.")
    draft_guesses: list[NamedToken] | None = Field(description="Where nothing was drawn; at most 5.")


class RoundTimings(_Answer):
    total_us: int
    hold_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    other_us: int
    draft_us: int | None = Field(description="Of the draft's steps, beside all these; null = not known.")


class Round(_Answer):
    committed_len: int = Field(description="Tokens of prompt and output before it.")
    drafter: str | None = Field(description="null for a plain step.")
    num_drafted: int
    num_accepted: int
    batch_size: int
    draft: list[DraftToken] = Field(description="What was verified, parents before their children.")
    rejection: Rejection | None = Field(description="null where all was kept, and where the answer ended before.")
    timings: RoundTimings


class ChoiceSpeculation(_Answer):
    tokens: list[TokenOfKind]
    round: Round | None = Field(default=None, description="With speculation.explain, of a stream.")


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description="tool_calls: of chats alone.")
    stop_reason: str | int | None
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds or explain.")


class _Whole(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: None


class PromptLogprob(_Answer):
    logprob: float
    rank: int = Field(description="1 + how many tokens are likelier.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; null of the first token."""


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int] = Field(default=[], description="With return_token_ids, as the next.")
    prompt_token_ids: list[int] = Field(default=[], description="In a choice's first chunk.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With prompt_logprobs.")


class Completion(_Whole):
    """Also a chunk of a stream; then `finish_reason` is null but in a choice's last one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | UsageSoFar | None = None
    metrics: AnswerMetrics | None = Field(default=None, description="Beside usage.")


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(_Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None = Field(description="null beside tool_calls where there is no text.")
    reasoning_content: str = Field(
        default="", description="Where the chat template marks reasoning, and there is some."
    )
    tool_calls: list[ToolCall] = Field(default=[], description="Where there are some.")
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] = Field(default=[], description="With return_token_ids.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With prompt_logprobs.")
    usage: UsageAnswer
    metrics: AnswerMetrics


class CalledFunctionDelta(_Answer):
    name: str = Field(default="", description="In a call's first delta.")
    arguments: str = Field(description="The next piece.")


class ToolCallDelta(_Answer):
    index: int
    id: str = Field(default="", description="In a call's first delta.")
    type: Literal["function"] = Field(default="function", description="In a call's first delta.")
    function: CalledFunctionDelta


class Delta(_Answer):
    role: Literal["assistant"] = Field(default="assistant", description="In a choice's first chunk.")
    content: str = Field(default="", description="Where there is some.")
    reasoning_content: str = Field(default="", description="Where there is some.")
    tool_calls: list[ToolCallDelta] = Field(default=[], description="Where there are some.")


class ChatChunkChoice(_Choice):
    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class ChatChunk(_Whole):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] = Field(default=[], description="With return_token_ids; in the first chunk.")
    usage: UsageAnswer | UsageSoFar | None = Field(
        default=None,
        description="With stream_options.include_usage; in the last chunk, and with continuous_usage_stats in each.",
    )
    metrics: AnswerMetrics | None = Field(default=None, description="In the last chunk, beside usage.")


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    draft: str | None
    drafter: str | None
    """Who drafts for requests that name no drafter; null where nobody does."""
    drafters: list[str]
    text_only: bool
    """Whether the model reads images, video or sound, too, and is served by its text part alone."""
    chat_template: Literal["turns", "plain"] | None
    """turns marks who speaks, plain writes the messages' text alone; null where there is no template."""
    sampling_defaults: dict[str, float]
    """What the checkpoint states for parameters that a request leaves out, as it is applied."""
    type: Literal["model"]
    """This and the next two are for Anthropic's clients."""
    display_name: str
    created_at: str


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Alive(_Answer):
    alive: bool


class Ready(_Answer):
    ready: bool
    reason: str | None
    refused: list[str]
    """Workers that do not start again, or answer and are not used, and why."""


class TargetGroup(_Answer):
    targets: list[str]
    labels: dict[str, str]


class ErrorFields(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    error: ErrorFields


class Tokenized(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class TokenizerInfo(BaseModel):
    """With the tokenizer's other special tokens, by their names."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Detokenized(_Answer):
    prompt: str


class Version(_Answer):
    version: str


class TokenCount(_Answer):
    input_tokens: int


class InputTokens(_Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputTokensDetails(_Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(_Answer):
    reasoning_tokens: int


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    speculation: SpeculationUsage


class OutputText(_Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ContentLogprob]


class ReasoningText(_Answer):
    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_Answer):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_Answer):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[str]
    content: list[ReasoningText]
    encrypted_content: None


class OutputCall(_Answer):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ResponseError(_Answer):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class Response(_Answer):
    """What was asked for is told as it was read."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds.")


class ResponseEvent(BaseModel):
    """One of OpenAI's, with its own fields."""

    type: str = Field(pattern=r"^response\.")
    sequence_number: int
    speculation: ChoiceSpeculation | None = Field(
        default=None, description="With speculation.token_kinds or explain: in a round's first event."
    )


class MessageUsage(_Answer):
    input_tokens: int = Field(description="Those that were not cached.")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    speculation: SpeculationUsage | None = Field(default=None, description="At the end.")


class TextBlock(_Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Answer):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlock(_Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageAnswer(_Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage
    speculation: ChoiceSpeculation | None = Field(default=None, description="With speculation.token_kinds.")


class MessageEvent(BaseModel):
    """One of Anthropic's, with its own fields."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    speculation: ChoiceSpeculation | None = Field(
        default=None, description="With speculation.token_kinds or explain: in a round's first event."
    )


class MessageErrorFields(_Answer):
    type: str
    message: str
    details: dict[str, Any] = {}


class MessageError(_Answer):
    type: Literal["error"]
    error: MessageErrorFields
