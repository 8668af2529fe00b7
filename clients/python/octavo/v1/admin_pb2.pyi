from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATUS_UNSPECIFIED: _ClassVar[WorkerStatus]
    WORKER_STATUS_CONNECTING: _ClassVar[WorkerStatus]
    WORKER_STATUS_READY: _ClassVar[WorkerStatus]
WORKER_STATUS_UNSPECIFIED: WorkerStatus
WORKER_STATUS_CONNECTING: WorkerStatus
WORKER_STATUS_READY: WorkerStatus

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("version", "uptime_ms", "draining", "queue", "workers", "totals")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_ms: int
    draining: bool
    queue: QueueState
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    totals: Totals
    def __init__(self, version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., draining: bool = ..., queue: _Optional[_Union[QueueState, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("accepted_request_count", "prompt_token_count", "completion_token_count", "prefix_query_token_count", "prefix_hit_token_count", "preemption_count")
    ACCEPTED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    accepted_request_count: int
    prompt_token_count: int
    completion_token_count: int
    prefix_query_token_count: int
    prefix_hit_token_count: int
    preemption_count: int
    def __init__(self, accepted_request_count: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., prefix_query_token_count: _Optional[int] = ..., prefix_hit_token_count: _Optional[int] = ..., preemption_count: _Optional[int] = ...) -> None: ...

class QueueState(_message.Message):
    __slots__ = ("waiting_sequence_count", "running_sequence_count", "preempted_sequence_count", "request_count", "waiting_prompt_token_count", "max_waiting_request_count", "max_waiting_prompt_token_count")
    WAITING_SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    waiting_sequence_count: int
    running_sequence_count: int
    preempted_sequence_count: int
    request_count: int
    waiting_prompt_token_count: int
    max_waiting_request_count: int
    max_waiting_prompt_token_count: int
    def __init__(self, waiting_sequence_count: _Optional[int] = ..., running_sequence_count: _Optional[int] = ..., preempted_sequence_count: _Optional[int] = ..., request_count: _Optional[int] = ..., waiting_prompt_token_count: _Optional[int] = ..., max_waiting_request_count: _Optional[int] = ..., max_waiting_prompt_token_count: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("name", "address", "status", "epoch", "incarnation", "step_seq", "lost_session_count", "device_pool", "host_pool", "model", "model_digest", "dtype", "backend")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    LOST_SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_POOL_FIELD_NUMBER: _ClassVar[int]
    HOST_POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    status: WorkerStatus
    epoch: int
    incarnation: int
    step_seq: int
    lost_session_count: int
    device_pool: PoolState
    host_pool: PoolState
    model: str
    model_digest: str
    dtype: str
    backend: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., status: _Optional[_Union[WorkerStatus, str]] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., step_seq: _Optional[int] = ..., lost_session_count: _Optional[int] = ..., device_pool: _Optional[_Union[PoolState, _Mapping]] = ..., host_pool: _Optional[_Union[PoolState, _Mapping]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., backend: _Optional[str] = ...) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("block_count", "used_block_count", "cached_block_count", "block_size", "held_token_count")
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    block_count: int
    used_block_count: int
    cached_block_count: int
    block_size: int
    held_token_count: int
    def __init__(self, block_count: _Optional[int] = ..., used_block_count: _Optional[int] = ..., cached_block_count: _Optional[int] = ..., block_size: _Optional[int] = ..., held_token_count: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("request_count",)
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_count: int
    def __init__(self, request_count: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("block_count",)
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    block_count: int
    def __init__(self, block_count: _Optional[int] = ...) -> None: ...
