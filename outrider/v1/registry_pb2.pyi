from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_DRAFT: _ClassVar[Role]
    ROLE_TARGET: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_DRAFT: Role
ROLE_TARGET: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_DRAINING: WorkerState

class Pool(_message.Message):
    __slots__ = ("name", "role", "model_name", "serves")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    model_name: str
    serves: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model_name: _Optional[str] = ..., serves: _Optional[_Iterable[str]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "pool", "role", "state", "address", "metrics_address", "node", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    role: Role
    state: WorkerState
    address: str
    metrics_address: str
    node: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerList(_message.Message):
    __slots__ = ("epoch", "version", "pools", "workers", "protocol")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    protocol: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., protocol: _Optional[int] = ...) -> None: ...

class GatewayReport(_message.Message):
    __slots__ = ("gateway", "pools", "responsive_workers", "protocol")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    RESPONSIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolLoad]
    responsive_workers: _containers.RepeatedScalarFieldContainer[str]
    protocol: int
    def __init__(self, gateway: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolLoad, _Mapping]]] = ..., responsive_workers: _Optional[_Iterable[str]] = ..., protocol: _Optional[int] = ...) -> None: ...

class PoolLoad(_message.Message):
    __slots__ = ("pool", "num_running", "num_queued", "num_refused", "num_rounds", "num_late")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    num_running: int
    num_queued: int
    num_refused: int
    num_rounds: int
    num_late: int
    def __init__(self, pool: _Optional[str] = ..., num_running: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_rounds: _Optional[int] = ..., num_late: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "num_workers")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    num_workers: int
    def __init__(self, pool: _Optional[str] = ..., num_workers: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("pool", "role", "num_desired", "num_starting", "num_serving", "num_draining")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_DESIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTING_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAINING_FIELD_NUMBER: _ClassVar[int]
    pool: str
    role: Role
    num_desired: int
    num_starting: int
    num_serving: int
    num_draining: int
    def __init__(self, pool: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., num_desired: _Optional[int] = ..., num_starting: _Optional[int] = ..., num_serving: _Optional[int] = ..., num_draining: _Optional[int] = ...) -> None: ...
