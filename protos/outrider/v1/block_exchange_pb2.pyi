from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Checksum(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKSUM_UNSPECIFIED: _ClassVar[Checksum]
    CHECKSUM_XXH3: _ClassVar[Checksum]
    CHECKSUM_WORDS: _ClassVar[Checksum]
CHECKSUM_UNSPECIFIED: Checksum
CHECKSUM_XXH3: Checksum
CHECKSUM_WORDS: Checksum

class GreetRequest(_message.Message):
    __slots__ = ("version", "engine_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    version: int
    engine_id: str
    def __init__(self, version: _Optional[int] = ..., engine_id: _Optional[str] = ...) -> None: ...

class BlockGroup(_message.Message):
    __slots__ = ("name", "fingerprint", "dtype", "shape", "block_nbytes", "num_blocks", "address", "stride")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    block_nbytes: int
    num_blocks: int
    address: int
    stride: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., block_nbytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., address: _Optional[int] = ..., stride: _Optional[int] = ...) -> None: ...

class GreetResponse(_message.Message):
    __slots__ = ("block_size", "groups", "is_on_device", "device_id", "agent_metadata")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    IS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[BlockGroup]
    is_on_device: bool
    device_id: int
    agent_metadata: bytes
    def __init__(self, block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[BlockGroup, _Mapping]]] = ..., is_on_device: _Optional[bool] = ..., device_id: _Optional[int] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("lease_id", "first", "count", "last_hash")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    first: int
    count: int
    last_hash: bytes
    def __init__(self, lease_id: _Optional[str] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., last_hash: _Optional[bytes] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("lease_id", "first", "count", "groups", "checksum")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    first: int
    count: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    checksum: Checksum
    def __init__(self, lease_id: _Optional[str] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., checksum: _Optional[_Union[Checksum, str]] = ...) -> None: ...

class BlockSum(_message.Message):
    __slots__ = ("sum",)
    SUM_FIELD_NUMBER: _ClassVar[int]
    sum: int
    def __init__(self, sum: _Optional[int] = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.RepeatedCompositeFieldContainer[BlockSum]
    def __init__(self, sums: _Optional[_Iterable[_Union[BlockSum, _Mapping]]] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("kept", "released")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedScalarFieldContainer[str]
    released: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kept: _Optional[_Iterable[str]] = ..., released: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
