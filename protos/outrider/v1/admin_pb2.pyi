from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_POLICY_UNSPECIFIED: _ClassVar[DraftPolicy]
    DRAFT_POLICY_AUTO: _ClassVar[DraftPolicy]
    DRAFT_POLICY_FIXED: _ClassVar[DraftPolicy]
DRAFT_POLICY_UNSPECIFIED: DraftPolicy
DRAFT_POLICY_AUTO: DraftPolicy
DRAFT_POLICY_FIXED: DraftPolicy

class DraftSchedule(_message.Message):
    __slots__ = ("num_speculative_tokens",)
    class NumSpeculativeTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_speculative_tokens: _containers.ScalarMap[int, int]
    def __init__(self, num_speculative_tokens: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Proposer(_message.Message):
    __slots__ = ("method", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    method: str
    parameters: _containers.ScalarMap[str, str]
    def __init__(self, method: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("enabled", "num_speculative_tokens", "max_num_speculative_tokens", "policy", "num_speculative_tokens_per_batch_size", "proposers")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_PER_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_speculative_tokens: int
    max_num_speculative_tokens: int
    policy: DraftPolicy
    num_speculative_tokens_per_batch_size: DraftSchedule
    proposers: _containers.RepeatedCompositeFieldContainer[Proposer]
    def __init__(self, enabled: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., max_num_speculative_tokens: _Optional[int] = ..., policy: _Optional[_Union[DraftPolicy, str]] = ..., num_speculative_tokens_per_batch_size: _Optional[_Union[DraftSchedule, _Mapping]] = ..., proposers: _Optional[_Iterable[_Union[Proposer, _Mapping]]] = ...) -> None: ...

class GetSpeculationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSpeculationResponse(_message.Message):
    __slots__ = ("speculation",)
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    speculation: Speculation
    def __init__(self, speculation: _Optional[_Union[Speculation, _Mapping]] = ...) -> None: ...

class ProposerChange(_message.Message):
    __slots__ = ("index", "method", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    index: int
    method: str
    parameters: _containers.ScalarMap[str, str]
    def __init__(self, index: _Optional[int] = ..., method: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("enabled", "num_speculative_tokens", "policy", "num_speculative_tokens_per_batch_size", "proposers")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_PER_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_speculative_tokens: int
    policy: DraftPolicy
    num_speculative_tokens_per_batch_size: DraftSchedule
    proposers: _containers.RepeatedCompositeFieldContainer[ProposerChange]
    def __init__(self, enabled: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., policy: _Optional[_Union[DraftPolicy, str]] = ..., num_speculative_tokens_per_batch_size: _Optional[_Union[DraftSchedule, _Mapping]] = ..., proposers: _Optional[_Iterable[_Union[ProposerChange, _Mapping]]] = ...) -> None: ...

class SetSpeculationResponse(_message.Message):
    __slots__ = ("speculation",)
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    speculation: Speculation
    def __init__(self, speculation: _Optional[_Union[Speculation, _Mapping]] = ...) -> None: ...
