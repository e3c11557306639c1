from protos.outrider.v1 import logprobs_pb2 as _logprobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvHandle(_message.Message):
    __slots__ = ("connector", "engine_id", "address", "lease_id", "num_tokens", "block_ids", "block_size", "fingerprint", "description")
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    connector: str
    engine_id: str
    address: str
    lease_id: str
    num_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    fingerprint: str
    description: str
    def __init__(self, connector: _Optional[str] = ..., engine_id: _Optional[str] = ..., address: _Optional[str] = ..., lease_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., fingerprint: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class ChoiceState(_message.Message):
    __slots__ = ("token_ids", "key", "delivered_tokens", "logprobs", "ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    key: int
    delivered_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_logprobs_pb2.PositionLogprobs]
    ended: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., key: _Optional[int] = ..., delivered_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_logprobs_pb2.PositionLogprobs, _Mapping]]] = ..., ended: _Optional[bool] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("choices", "source")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceState]
    source: KvHandle
    def __init__(self, choices: _Optional[_Iterable[_Union[ChoiceState, _Mapping]]] = ..., source: _Optional[_Union[KvHandle, _Mapping]] = ...) -> None: ...
