from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairRequest(_message.Message):
    __slots__ = ("target_address", "target_epoch")
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    target_address: str
    target_epoch: int
    def __init__(self, target_address: _Optional[str] = ..., target_epoch: _Optional[int] = ...) -> None: ...

class PairReply(_message.Message):
    __slots__ = ("is_compatible", "reason")
    IS_COMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    is_compatible: bool
    reason: str
    def __init__(self, is_compatible: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class DraftRequestBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("id", "epoch", "open", "advance", "truncate", "close")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    id: int
    epoch: int
    open: _common_pb2.OpenSlot
    advance: Advance
    truncate: _common_pb2.Truncate
    close: _common_pb2.CloseSlot
    def __init__(self, id: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[_common_pb2.OpenSlot, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ..., truncate: _Optional[_Union[_common_pb2.Truncate, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.CloseSlot, _Mapping]] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("slot", "ticket", "base_len", "committed_ids", "is_missed", "levels")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_MISSED_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    ticket: int
    base_len: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    is_missed: bool
    levels: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamLevel]
    def __init__(self, slot: _Optional[int] = ..., ticket: _Optional[int] = ..., base_len: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., is_missed: _Optional[bool] = ..., levels: _Optional[_Iterable[_Union[_common_pb2.BeamLevel, _Mapping]]] = ...) -> None: ...

class DraftReplyBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftReply]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("id", "open", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    open: _common_pb2.OpenReply
    error: _common_pb2.WorkerError
    def __init__(self, id: _Optional[int] = ..., open: _Optional[_Union[_common_pb2.OpenReply, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.WorkerError, _Mapping]] = ...) -> None: ...
