from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_FALSE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_TRUE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_REJECTION: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_COUPLED: _ClassVar[AcceptanceRule]

class TokenKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_KIND_UNSPECIFIED: _ClassVar[TokenKind]
    TOKEN_KIND_ACCEPTED: _ClassVar[TokenKind]
    TOKEN_KIND_RECOVERED: _ClassVar[TokenKind]
    TOKEN_KIND_BONUS: _ClassVar[TokenKind]
    TOKEN_KIND_PLAIN: _ClassVar[TokenKind]
    TOKEN_KIND_FORCED: _ClassVar[TokenKind]
    TOKEN_KIND_PREDICTED: _ClassVar[TokenKind]

class DraftTokenKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_TOKEN_KIND_UNSPECIFIED: _ClassVar[DraftTokenKind]
    DRAFT_TOKEN_KIND_SAMPLED: _ClassVar[DraftTokenKind]
    DRAFT_TOKEN_KIND_DETERMINISTIC: _ClassVar[DraftTokenKind]
    DRAFT_TOKEN_KIND_FORCED: _ClassVar[DraftTokenKind]
    DRAFT_TOKEN_KIND_PREDICTED: _ClassVar[DraftTokenKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class DraftLogprobs(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_LOGPROBS_UNSPECIFIED: _ClassVar[DraftLogprobs]
    DRAFT_LOGPROBS_AUTO: _ClassVar[DraftLogprobs]
    DRAFT_LOGPROBS_FULL: _ClassVar[DraftLogprobs]
    DRAFT_LOGPROBS_TOPK: _ClassVar[DraftLogprobs]

class TensorDType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_DTYPE_UNSPECIFIED: _ClassVar[TensorDType]
    TENSOR_DTYPE_FLOAT32: _ClassVar[TensorDType]
    TENSOR_DTYPE_INT32: _ClassVar[TensorDType]

class TruncateReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATE_REASON_UNSPECIFIED: _ClassVar[TruncateReason]
    TRUNCATE_REASON_REJECTED: _ClassVar[TruncateReason]
    TRUNCATE_REASON_STOP: _ClassVar[TruncateReason]
    TRUNCATE_REASON_WASTED: _ClassVar[TruncateReason]

class WorkerErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ERROR_CODE_UNSPECIFIED: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_UNKNOWN_SLOT: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_BEHIND: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_STALE_EPOCH: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_EXHAUSTED: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_INVALID: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_INTERNAL: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_CANCELLED: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_DRAINING: _ClassVar[WorkerErrorCode]
    WORKER_ERROR_CODE_GRAMMAR: _ClassVar[WorkerErrorCode]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_FALSE: EarlyStopping
EARLY_STOPPING_TRUE: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_REJECTION: AcceptanceRule
ACCEPTANCE_RULE_COUPLED: AcceptanceRule
TOKEN_KIND_UNSPECIFIED: TokenKind
TOKEN_KIND_ACCEPTED: TokenKind
TOKEN_KIND_RECOVERED: TokenKind
TOKEN_KIND_BONUS: TokenKind
TOKEN_KIND_PLAIN: TokenKind
TOKEN_KIND_FORCED: TokenKind
TOKEN_KIND_PREDICTED: TokenKind
DRAFT_TOKEN_KIND_UNSPECIFIED: DraftTokenKind
DRAFT_TOKEN_KIND_SAMPLED: DraftTokenKind
DRAFT_TOKEN_KIND_DETERMINISTIC: DraftTokenKind
DRAFT_TOKEN_KIND_FORCED: DraftTokenKind
DRAFT_TOKEN_KIND_PREDICTED: DraftTokenKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
DRAFT_LOGPROBS_UNSPECIFIED: DraftLogprobs
DRAFT_LOGPROBS_AUTO: DraftLogprobs
DRAFT_LOGPROBS_FULL: DraftLogprobs
DRAFT_LOGPROBS_TOPK: DraftLogprobs
TENSOR_DTYPE_UNSPECIFIED: TensorDType
TENSOR_DTYPE_FLOAT32: TensorDType
TENSOR_DTYPE_INT32: TensorDType
TRUNCATE_REASON_UNSPECIFIED: TruncateReason
TRUNCATE_REASON_REJECTED: TruncateReason
TRUNCATE_REASON_STOP: TruncateReason
TRUNCATE_REASON_WASTED: TruncateReason
WORKER_ERROR_CODE_UNSPECIFIED: WorkerErrorCode
WORKER_ERROR_CODE_UNKNOWN_SLOT: WorkerErrorCode
WORKER_ERROR_CODE_BEHIND: WorkerErrorCode
WORKER_ERROR_CODE_STALE_EPOCH: WorkerErrorCode
WORKER_ERROR_CODE_EXHAUSTED: WorkerErrorCode
WORKER_ERROR_CODE_INVALID: WorkerErrorCode
WORKER_ERROR_CODE_INTERNAL: WorkerErrorCode
WORKER_ERROR_CODE_CANCELLED: WorkerErrorCode
WORKER_ERROR_CODE_DRAINING: WorkerErrorCode
WORKER_ERROR_CODE_GRAMMAR: WorkerErrorCode

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens", "seed", "choice", "max_tokens", "stop_token_ids", "ignore_eos", "num_logprobs", "acceptance", "lenience", "grammar", "beams")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    seed: int
    choice: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_logprobs: int
    acceptance: AcceptanceRule
    lenience: float
    grammar: str
    beams: BeamSearch
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., num_logprobs: _Optional[int] = ..., acceptance: _Optional[_Union[AcceptanceRule, str]] = ..., lenience: _Optional[float] = ..., grammar: _Optional[str] = ..., beams: _Optional[_Union[BeamSearch, _Mapping]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class BeamLevel(_message.Message):
    __slots__ = ("parents", "ids", "sums", "ended_parents", "ended_ids", "ended_sums")
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    ENDED_PARENTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SUMS_FIELD_NUMBER: _ClassVar[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[float]
    ended_parents: _containers.RepeatedScalarFieldContainer[int]
    ended_ids: _containers.RepeatedScalarFieldContainer[int]
    ended_sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, parents: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[float]] = ..., ended_parents: _Optional[_Iterable[int]] = ..., ended_ids: _Optional[_Iterable[int]] = ..., ended_sums: _Optional[_Iterable[float]] = ...) -> None: ...

class TreeShape(_message.Message):
    __slots__ = ("widths", "num_nodes", "max_depth")
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    widths: _containers.RepeatedScalarFieldContainer[int]
    num_nodes: int
    max_depth: int
    def __init__(self, widths: _Optional[_Iterable[int]] = ..., num_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftToken(_message.Message):
    __slots__ = ("id", "parent", "kind", "is_accepted", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    parent: int
    kind: DraftTokenKind
    is_accepted: bool
    text: str
    def __init__(self, id: _Optional[int] = ..., parent: _Optional[int] = ..., kind: _Optional[_Union[DraftTokenKind, str]] = ..., is_accepted: _Optional[bool] = ..., text: _Optional[str] = ...) -> None: ...

class RankedToken(_message.Message):
    __slots__ = ("id", "logprob", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    text: str
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("parent", "token", "target", "draft_distribution", "deterministic_tokens")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    token: RankedToken
    target: _containers.RepeatedCompositeFieldContainer[RankedToken]
    draft_distribution: _containers.RepeatedCompositeFieldContainer[RankedToken]
    deterministic_tokens: _containers.RepeatedCompositeFieldContainer[RankedToken]
    def __init__(self, parent: _Optional[int] = ..., token: _Optional[_Union[RankedToken, _Mapping]] = ..., target: _Optional[_Iterable[_Union[RankedToken, _Mapping]]] = ..., draft_distribution: _Optional[_Iterable[_Union[RankedToken, _Mapping]]] = ..., deterministic_tokens: _Optional[_Iterable[_Union[RankedToken, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("draft", "rejection", "draft_us")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    draft: _containers.RepeatedCompositeFieldContainer[DraftToken]
    rejection: Rejection
    draft_us: int
    def __init__(self, draft: _Optional[_Iterable[_Union[DraftToken, _Mapping]]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., draft_us: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: TensorDType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[TensorDType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TokenDistributions(_message.Message):
    __slots__ = ("vocab_size", "dense", "sparse_ids", "sparse_logprobs", "support_sizes")
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_IDS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZES_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    dense: Tensor
    sparse_ids: Tensor
    sparse_logprobs: Tensor
    support_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, vocab_size: _Optional[int] = ..., dense: _Optional[_Union[Tensor, _Mapping]] = ..., sparse_ids: _Optional[_Union[Tensor, _Mapping]] = ..., sparse_logprobs: _Optional[_Union[Tensor, _Mapping]] = ..., support_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("model_id", "vocab_size", "tokenizer_fingerprint", "context_limit", "dtype", "device", "epoch", "pid", "cpu_cores", "visible_devices", "num_slots", "num_slots_in_use", "num_kv_blocks", "num_kv_blocks_in_use", "kv_block_size", "attention_path", "metrics_address", "eos_token_ids", "num_leases", "version", "num_parameters", "num_steps", "is_batch_invariant", "quantization", "tensor_parallel", "kv_bytes_per_token", "num_kv_blocks_cached", "busy_us", "longest_step_us", "is_draining", "current_step_us", "drafters", "supports_trees", "protocol", "supports_features", "features_refusal", "hidden_size", "num_layers", "needs_features", "supports_retokenization", "shared_vocabularies", "supports_beams", "decoder_start_ids", "sampling_defaults", "is_text_only")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CPU_CORES_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_DEVICES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_PATH_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_US_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    CURRENT_STEP_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_TREES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_RETOKENIZATION_FIELD_NUMBER: _ClassVar[int]
    SHARED_VOCABULARIES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_BEAMS_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    IS_TEXT_ONLY_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    vocab_size: int
    tokenizer_fingerprint: str
    context_limit: int
    dtype: str
    device: str
    epoch: int
    pid: int
    cpu_cores: _containers.RepeatedScalarFieldContainer[int]
    visible_devices: str
    num_slots: int
    num_slots_in_use: int
    num_kv_blocks: int
    num_kv_blocks_in_use: int
    kv_block_size: int
    attention_path: str
    metrics_address: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_leases: int
    version: str
    num_parameters: int
    num_steps: int
    is_batch_invariant: bool
    quantization: str
    tensor_parallel: int
    kv_bytes_per_token: int
    num_kv_blocks_cached: int
    busy_us: int
    longest_step_us: int
    is_draining: bool
    current_step_us: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    supports_trees: bool
    protocol: int
    supports_features: bool
    features_refusal: str
    hidden_size: int
    num_layers: int
    needs_features: bool
    supports_retokenization: bool
    shared_vocabularies: _containers.RepeatedCompositeFieldContainer[SharedVocabulary]
    supports_beams: bool
    decoder_start_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_defaults: SamplingDefaults
    is_text_only: bool
    def __init__(self, model_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., context_limit: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., cpu_cores: _Optional[_Iterable[int]] = ..., visible_devices: _Optional[str] = ..., num_slots: _Optional[int] = ..., num_slots_in_use: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., num_kv_blocks_in_use: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., attention_path: _Optional[str] = ..., metrics_address: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_leases: _Optional[int] = ..., version: _Optional[str] = ..., num_parameters: _Optional[int] = ..., num_steps: _Optional[int] = ..., is_batch_invariant: _Optional[bool] = ..., quantization: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., num_kv_blocks_cached: _Optional[int] = ..., busy_us: _Optional[int] = ..., longest_step_us: _Optional[int] = ..., is_draining: _Optional[bool] = ..., current_step_us: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., supports_trees: _Optional[bool] = ..., protocol: _Optional[int] = ..., supports_features: _Optional[bool] = ..., features_refusal: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., needs_features: _Optional[bool] = ..., supports_retokenization: _Optional[bool] = ..., shared_vocabularies: _Optional[_Iterable[_Union[SharedVocabulary, _Mapping]]] = ..., supports_beams: _Optional[bool] = ..., decoder_start_ids: _Optional[_Iterable[int]] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., is_text_only: _Optional[bool] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: float
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[float] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[float] = ...) -> None: ...

class SharedVocabulary(_message.Message):
    __slots__ = ("tokenizer_fingerprint", "vocab_size", "num_shared", "shared_fraction")
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    tokenizer_fingerprint: str
    vocab_size: int
    num_shared: int
    shared_fraction: float
    def __init__(self, tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_shared: _Optional[int] = ..., shared_fraction: _Optional[float] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerFiles(_message.Message):
    __slots__ = ("tokenizer_json", "tokenizer_config_json", "chat_template", "additional_chat_templates")
    class AdditionalChatTemplatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ADDITIONAL_CHAT_TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    tokenizer_config_json: bytes
    chat_template: bytes
    additional_chat_templates: _containers.ScalarMap[str, bytes]
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., tokenizer_config_json: _Optional[bytes] = ..., chat_template: _Optional[bytes] = ..., additional_chat_templates: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class OpenSlot(_message.Message):
    __slots__ = ("slot", "committed_ids", "num_prompt_tokens", "params", "target_address", "target_epoch", "cache_salt", "traceparent", "drafter", "protocol", "speculation", "prediction_ids", "source_ids", "num_prompt_logprobs", "scheduling", "corpus_id")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    CORPUS_ID_FIELD_NUMBER: _ClassVar[int]
    slot: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    params: SamplingParams
    target_address: str
    target_epoch: int
    cache_salt: bytes
    traceparent: str
    drafter: str
    protocol: int
    speculation: Speculation
    prediction_ids: _containers.RepeatedScalarFieldContainer[int]
    source_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_logprobs: int
    scheduling: Scheduling
    corpus_id: bytes
    def __init__(self, slot: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., target_address: _Optional[str] = ..., target_epoch: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., drafter: _Optional[str] = ..., protocol: _Optional[int] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., prediction_ids: _Optional[_Iterable[int]] = ..., source_ids: _Optional[_Iterable[int]] = ..., num_prompt_logprobs: _Optional[int] = ..., scheduling: _Optional[_Union[Scheduling, _Mapping]] = ..., corpus_id: _Optional[bytes] = ...) -> None: ...

class Scheduling(_message.Message):
    __slots__ = ("caller", "weight", "priority", "max_tpot_ms")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    caller: bytes
    weight: float
    priority: int
    max_tpot_ms: float
    def __init__(self, caller: _Optional[bytes] = ..., weight: _Optional[float] = ..., priority: _Optional[int] = ..., max_tpot_ms: _Optional[float] = ...) -> None: ...

class NumDraftTokens(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("num_draft_tokens", "max_draft_tokens", "tree", "draft_logprobs", "draft_topk", "is_sequential", "draft_index", "explain")
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOPK_FIELD_NUMBER: _ClassVar[int]
    IS_SEQUENTIAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INDEX_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    num_draft_tokens: NumDraftTokens
    max_draft_tokens: int
    tree: TreeShape
    draft_logprobs: DraftLogprobs
    draft_topk: int
    is_sequential: bool
    draft_index: int
    explain: bool
    def __init__(self, num_draft_tokens: _Optional[_Union[NumDraftTokens, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., tree: _Optional[_Union[TreeShape, _Mapping]] = ..., draft_logprobs: _Optional[_Union[DraftLogprobs, str]] = ..., draft_topk: _Optional[int] = ..., is_sequential: _Optional[bool] = ..., draft_index: _Optional[int] = ..., explain: _Optional[bool] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("committed_len",)
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    committed_len: int
    def __init__(self, committed_len: _Optional[int] = ...) -> None: ...

class Truncate(_message.Message):
    __slots__ = ("slot", "committed_len", "reason")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    slot: int
    committed_len: int
    reason: TruncateReason
    def __init__(self, slot: _Optional[int] = ..., committed_len: _Optional[int] = ..., reason: _Optional[_Union[TruncateReason, str]] = ...) -> None: ...

class CloseSlot(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

class WorkerError(_message.Message):
    __slots__ = ("code", "message", "committed_len")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    code: WorkerErrorCode
    message: str
    committed_len: int
    def __init__(self, code: _Optional[_Union[WorkerErrorCode, str]] = ..., message: _Optional[str] = ..., committed_len: _Optional[int] = ...) -> None: ...
