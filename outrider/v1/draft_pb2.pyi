from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequestBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("id", "epoch", "open", "propose", "truncate", "close")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    id: int
    epoch: int
    open: _common_pb2.OpenSlot
    propose: Propose
    truncate: _common_pb2.Truncate
    close: _common_pb2.CloseSlot
    def __init__(self, id: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[_common_pb2.OpenSlot, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., truncate: _Optional[_Union[_common_pb2.Truncate, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.CloseSlot, _Mapping]] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("slot", "base_len", "committed_ids", "num_draft_tokens", "ticket", "draft_logprobs", "draft_topk", "tree", "min_confidence")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOPK_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    base_len: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    ticket: int
    draft_logprobs: _common_pb2.DraftLogprobs
    draft_topk: int
    tree: _common_pb2.TreeShape
    min_confidence: float
    def __init__(self, slot: _Optional[int] = ..., base_len: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., ticket: _Optional[int] = ..., draft_logprobs: _Optional[_Union[_common_pb2.DraftLogprobs, str]] = ..., draft_topk: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.TreeShape, _Mapping]] = ..., min_confidence: _Optional[float] = ...) -> None: ...

class DraftReplyBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftReply]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("id", "open", "propose", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    open: _common_pb2.OpenReply
    propose: ProposeReply
    error: _common_pb2.WorkerError
    def __init__(self, id: _Optional[int] = ..., open: _Optional[_Union[_common_pb2.OpenReply, _Mapping]] = ..., propose: _Optional[_Union[ProposeReply, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.WorkerError, _Mapping]] = ...) -> None: ...

class ProposeReply(_message.Message):
    __slots__ = ("draft_ids", "queue_us", "compute_us", "payload_bytes", "encoding", "num_fed_tokens", "num_cached_tokens")
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUM_FED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    queue_us: int
    compute_us: int
    payload_bytes: int
    encoding: str
    num_fed_tokens: int
    num_cached_tokens: int
    def __init__(self, draft_ids: _Optional[_Iterable[int]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., encoding: _Optional[str] = ..., num_fed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...
