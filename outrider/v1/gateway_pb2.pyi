from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_ids", "chat", "params", "has_seed", "num_choices", "stop", "speculation", "bad_words", "cache_salt", "user", "structured_outputs", "prediction", "priority", "max_tpot_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    HAS_SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_ids: _common_pb2.TokenSequence
    chat: ChatInput
    params: _common_pb2.SamplingParams
    has_seed: bool
    num_choices: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    speculation: SpeculationOptions
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    user: str
    structured_outputs: StructuredOutputs
    prediction: str
    priority: int
    max_tpot_ms: float
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_ids: _Optional[_Union[_common_pb2.TokenSequence, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., has_seed: _Optional[bool] = ..., num_choices: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., bad_words: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., user: _Optional[str] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., prediction: _Optional[str] = ..., priority: _Optional[int] = ..., max_tpot_ms: _Optional[float] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "regex", "choice", "grammar", "json_object", "strict")
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    json: str
    regex: str
    choice: Choices
    grammar: str
    json_object: bool
    strict: bool
    def __init__(self, json: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., json_object: _Optional[bool] = ..., strict: _Optional[bool] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("enabled", "num_draft_tokens", "draft_logprobs", "draft_topk", "acceptance", "lenience", "drafter", "tree", "explain")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOPK_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_draft_tokens: _common_pb2.NumDraftTokens
    draft_logprobs: _common_pb2.DraftLogprobs
    draft_topk: int
    acceptance: _common_pb2.AcceptanceRule
    lenience: float
    drafter: str
    tree: _common_pb2.TreeShape
    explain: bool
    def __init__(self, enabled: _Optional[bool] = ..., num_draft_tokens: _Optional[_Union[_common_pb2.NumDraftTokens, _Mapping]] = ..., draft_logprobs: _Optional[_Union[_common_pb2.DraftLogprobs, str]] = ..., draft_topk: _Optional[int] = ..., acceptance: _Optional[_Union[_common_pb2.AcceptanceRule, str]] = ..., lenience: _Optional[float] = ..., drafter: _Optional[str] = ..., tree: _Optional[_Union[_common_pb2.TreeShape, _Mapping]] = ..., explain: _Optional[bool] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("id", "kind", "logprobs", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: _common_pb2.TokenKind
    logprobs: _common_pb2.TokenLogprobs
    text: str
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[_Union[_common_pb2.TokenKind, str]] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "choice", "tokens", "text_delta", "finish_reason", "num_drafted", "num_accepted", "usage", "stop_reason", "timings", "score", "explanation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    text_delta: str
    finish_reason: _common_pb2.FinishReason
    num_drafted: int
    num_accepted: int
    usage: Usage
    stop_reason: str
    timings: RoundTimings
    score: float
    explanation: RoundExplanation
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., text_delta: _Optional[str] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stop_reason: _Optional[str] = ..., timings: _Optional[_Union[RoundTimings, _Mapping]] = ..., score: _Optional[float] = ..., explanation: _Optional[_Union[RoundExplanation, _Mapping]] = ...) -> None: ...

class RoundExplanation(_message.Message):
    __slots__ = ("committed_len", "drafter", "batch_size", "queue_us", "forward_us", "accept_us", "verified")
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    committed_len: int
    drafter: str
    batch_size: int
    queue_us: int
    forward_us: int
    accept_us: int
    verified: _common_pb2.Explanation
    def __init__(self, committed_len: _Optional[int] = ..., drafter: _Optional[str] = ..., batch_size: _Optional[int] = ..., queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., accept_us: _Optional[int] = ..., verified: _Optional[_Union[_common_pb2.Explanation, _Mapping]] = ...) -> None: ...

class RoundTimings(_message.Message):
    __slots__ = ("total_us", "deliver_us", "verify_us", "overhead_us")
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    DELIVER_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_US_FIELD_NUMBER: _ClassVar[int]
    total_us: int
    deliver_us: int
    verify_us: int
    overhead_us: int
    def __init__(self, total_us: _Optional[int] = ..., deliver_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., overhead_us: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_completion_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_plain_steps", "num_wasted_tokens", "seed", "num_cached_prompt_tokens", "lenience", "num_accepted_prediction_tokens", "num_rejected_prediction_tokens", "plain_reason")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_REASON_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_plain_steps: int
    num_wasted_tokens: int
    seed: int
    num_cached_prompt_tokens: int
    lenience: float
    num_accepted_prediction_tokens: int
    num_rejected_prediction_tokens: int
    plain_reason: str
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., num_rounds: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_plain_steps: _Optional[int] = ..., num_wasted_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., num_cached_prompt_tokens: _Optional[int] = ..., lenience: _Optional[float] = ..., num_accepted_prediction_tokens: _Optional[int] = ..., num_rejected_prediction_tokens: _Optional[int] = ..., plain_reason: _Optional[str] = ...) -> None: ...

class GetModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelsResponse(_message.Message):
    __slots__ = ("models", "http_port")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    http_port: int
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., http_port: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "context_limit", "vocab_size", "draft_id", "drafters")
    ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    context_limit: int
    vocab_size: int
    draft_id: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., context_limit: _Optional[int] = ..., vocab_size: _Optional[int] = ..., draft_id: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ...) -> None: ...
