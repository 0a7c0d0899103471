from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FallbackReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FALLBACK_REASON_UNSPECIFIED: _ClassVar[FallbackReason]
    FALLBACK_REASON_LATE: _ClassVar[FallbackReason]
    FALLBACK_REASON_REFUSED: _ClassVar[FallbackReason]
    FALLBACK_REASON_DOES_NOT_PAY: _ClassVar[FallbackReason]

class NodeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_KIND_UNSPECIFIED: _ClassVar[NodeKind]
    NODE_KIND_DETERMINISTIC: _ClassVar[NodeKind]
    NODE_KIND_SAMPLED: _ClassVar[NodeKind]
    NODE_KIND_RECOVERY: _ClassVar[NodeKind]
    NODE_KIND_REFERENCE: _ClassVar[NodeKind]

class HeadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEAD_STATE_UNSPECIFIED: _ClassVar[HeadState]
    HEAD_STATE_NEEDS_WEIGHTS: _ClassVar[HeadState]
    HEAD_STATE_READY: _ClassVar[HeadState]
    HEAD_STATE_REFUSED: _ClassVar[HeadState]
FALLBACK_REASON_UNSPECIFIED: FallbackReason
FALLBACK_REASON_LATE: FallbackReason
FALLBACK_REASON_REFUSED: FallbackReason
FALLBACK_REASON_DOES_NOT_PAY: FallbackReason
NODE_KIND_UNSPECIFIED: NodeKind
NODE_KIND_DETERMINISTIC: NodeKind
NODE_KIND_SAMPLED: NodeKind
NODE_KIND_RECOVERY: NodeKind
NODE_KIND_REFERENCE: NodeKind
HEAD_STATE_UNSPECIFIED: HeadState
HEAD_STATE_NEEDS_WEIGHTS: HeadState
HEAD_STATE_READY: HeadState
HEAD_STATE_REFUSED: HeadState

class TargetRequestBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TargetRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[TargetRequest, _Mapping]]] = ...) -> None: ...

class TargetRequest(_message.Message):
    __slots__ = ("id", "epoch", "open", "verify", "truncate", "close", "extend")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    id: int
    epoch: int
    open: _common_pb2.OpenSlot
    verify: Verify
    truncate: _common_pb2.Truncate
    close: _common_pb2.CloseSlot
    extend: Extend
    def __init__(self, id: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[_common_pb2.OpenSlot, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., truncate: _Optional[_Union[_common_pb2.Truncate, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.CloseSlot, _Mapping]] = ..., extend: _Optional[_Union[Extend, _Mapping]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("slot", "base_len", "committed_ids", "tickets", "lease_end_len", "levels")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    LEASE_END_LEN_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    base_len: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    tickets: _containers.RepeatedCompositeFieldContainer[DraftTicket]
    lease_end_len: int
    levels: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamLevel]
    def __init__(self, slot: _Optional[int] = ..., base_len: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., tickets: _Optional[_Iterable[_Union[DraftTicket, _Mapping]]] = ..., lease_end_len: _Optional[int] = ..., levels: _Optional[_Iterable[_Union[_common_pb2.BeamLevel, _Mapping]]] = ...) -> None: ...

class DraftTicket(_message.Message):
    __slots__ = ("ticket", "is_drafted")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    is_drafted: bool
    def __init__(self, ticket: _Optional[int] = ..., is_drafted: _Optional[bool] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("slot", "ticket", "lease_end_len")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_END_LEN_FIELD_NUMBER: _ClassVar[int]
    slot: int
    ticket: int
    lease_end_len: int
    def __init__(self, slot: _Optional[int] = ..., ticket: _Optional[int] = ..., lease_end_len: _Optional[int] = ...) -> None: ...

class TargetReplyBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TargetReply]
    def __init__(self, items: _Optional[_Iterable[_Union[TargetReply, _Mapping]]] = ...) -> None: ...

class TargetReply(_message.Message):
    __slots__ = ("id", "open", "verdict", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    open: _common_pb2.OpenReply
    verdict: Verdict
    error: _common_pb2.WorkerError
    def __init__(self, id: _Optional[int] = ..., open: _Optional[_Union[_common_pb2.OpenReply, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.WorkerError, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("committed_len", "token_ids", "kinds", "num_drafted", "num_accepted", "finish_reason", "logprobs", "fallback", "wait_us", "queue_us", "forward_us", "accept_us", "batch_size", "num_cached_tokens", "num_batch_tokens", "drafter", "outcomes", "depth", "num_predicted", "explanation", "levels", "hypotheses", "prompt_logprobs")
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    committed_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kinds: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenKind]
    num_drafted: int
    num_accepted: int
    finish_reason: _common_pb2.FinishReason
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    fallback: FallbackReason
    wait_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    batch_size: int
    num_cached_tokens: int
    num_batch_tokens: int
    drafter: str
    outcomes: _containers.RepeatedCompositeFieldContainer[DraftOutcome]
    depth: int
    num_predicted: int
    explanation: _common_pb2.Explanation
    levels: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamLevel]
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, committed_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., kinds: _Optional[_Iterable[_Union[_common_pb2.TokenKind, str]]] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., fallback: _Optional[_Union[FallbackReason, str]] = ..., wait_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., accept_us: _Optional[int] = ..., batch_size: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_batch_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., outcomes: _Optional[_Iterable[_Union[DraftOutcome, _Mapping]]] = ..., depth: _Optional[int] = ..., num_predicted: _Optional[int] = ..., explanation: _Optional[_Union[_common_pb2.Explanation, _Mapping]] = ..., levels: _Optional[_Iterable[_Union[_common_pb2.BeamLevel, _Mapping]]] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class DraftOutcome(_message.Message):
    __slots__ = ("num_drafted", "num_accepted", "is_verified", "has_drafts", "is_refused", "num_wasted")
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    IS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    IS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_FIELD_NUMBER: _ClassVar[int]
    num_drafted: int
    num_accepted: int
    is_verified: bool
    has_drafts: bool
    is_refused: bool
    num_wasted: int
    def __init__(self, num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., is_verified: _Optional[bool] = ..., has_drafts: _Optional[bool] = ..., is_refused: _Optional[bool] = ..., num_wasted: _Optional[int] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("ids", "score", "stop_token_id")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    score: float
    stop_token_id: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., score: _Optional[float] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class DeliveryBatch(_message.Message):
    __slots__ = ("items", "head_requests")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    HEAD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Delivery]
    head_requests: _containers.RepeatedCompositeFieldContainer[HeadRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ..., head_requests: _Optional[_Iterable[_Union[HeadRequest, _Mapping]]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("ticket", "target_epoch", "root_len", "ids", "parents", "ranks", "kinds", "distributions", "ends", "draft_us")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_LEN_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    target_epoch: int
    root_len: int
    ids: bytes
    parents: bytes
    ranks: bytes
    kinds: bytes
    distributions: _common_pb2.TokenDistributions
    ends: bytes
    draft_us: int
    def __init__(self, ticket: _Optional[int] = ..., target_epoch: _Optional[int] = ..., root_len: _Optional[int] = ..., ids: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., kinds: _Optional[bytes] = ..., distributions: _Optional[_Union[_common_pb2.TokenDistributions, _Mapping]] = ..., ends: _Optional[bytes] = ..., draft_us: _Optional[int] = ...) -> None: ...

class HeadRequest(_message.Message):
    __slots__ = ("head", "weights", "features")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    head: HeadSpec
    weights: HeadWeights
    features: FeatureRequest
    def __init__(self, head: _Optional[_Union[HeadSpec, _Mapping]] = ..., weights: _Optional[_Union[HeadWeights, _Mapping]] = ..., features: _Optional[_Union[FeatureRequest, _Mapping]] = ...) -> None: ...

class HeadSpec(_message.Message):
    __slots__ = ("target_epoch", "digest", "num_bytes")
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    target_epoch: int
    digest: bytes
    num_bytes: int
    def __init__(self, target_epoch: _Optional[int] = ..., digest: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class HeadWeights(_message.Message):
    __slots__ = ("digest", "offset", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FeatureRequest(_message.Message):
    __slots__ = ("target_epoch", "ticket", "digest", "start", "id")
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    target_epoch: int
    ticket: int
    digest: bytes
    start: int
    id: int
    def __init__(self, target_epoch: _Optional[int] = ..., ticket: _Optional[int] = ..., digest: _Optional[bytes] = ..., start: _Optional[int] = ..., id: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("target_epoch", "token_ids", "taps")
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAPS_FIELD_NUMBER: _ClassVar[int]
    target_epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    taps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target_epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., taps: _Optional[_Iterable[int]] = ...) -> None: ...

class FeatureBatch(_message.Message):
    __slots__ = ("chunks", "head_replies", "summary")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HEAD_REPLIES_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[FeatureChunk]
    head_replies: _containers.RepeatedCompositeFieldContainer[HeadReply]
    summary: DeliverSummary
    def __init__(self, chunks: _Optional[_Iterable[_Union[FeatureChunk, _Mapping]]] = ..., head_replies: _Optional[_Iterable[_Union[HeadReply, _Mapping]]] = ..., summary: _Optional[_Union[DeliverSummary, _Mapping]] = ...) -> None: ...

class FeatureChunk(_message.Message):
    __slots__ = ("ticket", "target_epoch", "start", "num_tokens", "data", "request_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    target_epoch: int
    start: int
    num_tokens: int
    data: bytes
    request_id: int
    def __init__(self, ticket: _Optional[int] = ..., target_epoch: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., data: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class HeadReply(_message.Message):
    __slots__ = ("digest", "state", "reason", "target_epoch")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    state: HeadState
    reason: str
    target_epoch: int
    def __init__(self, digest: _Optional[bytes] = ..., state: _Optional[_Union[HeadState, str]] = ..., reason: _Optional[str] = ..., target_epoch: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("taps", "best_ids")
    TAPS_FIELD_NUMBER: _ClassVar[int]
    BEST_IDS_FIELD_NUMBER: _ClassVar[int]
    taps: bytes
    best_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, taps: _Optional[bytes] = ..., best_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DeliverSummary(_message.Message):
    __slots__ = ("num_deliveries", "num_refused")
    NUM_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_deliveries: int
    num_refused: int
    def __init__(self, num_deliveries: _Optional[int] = ..., num_refused: _Optional[int] = ...) -> None: ...
