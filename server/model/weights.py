"""What a folder's safetensors files hold, read from their headers alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOAT_PREFIXES = ("F", "BF")
_HEADER_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type as safetensors names it ("BF16"), and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(_FLOAT_PREFIXES)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files, in name order, and every tensor in them."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]


def read_weight_files(folder: Path) -> WeightFiles:
    """Find the model's safetensors files and check that each is there and whole.

    Raises: ModelError if one is missing, cut short or no safetensors file at all.
    """
    tensors: dict[str, TensorInfo] = {}
    paths = _find_files(folder)
    for path in paths:
        tensors |= _read_header(path)
    return WeightFiles(paths, tensors)


def _find_files(folder: Path) -> tuple[Path, ...]:
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is broken ({error}); fetch the model again") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files, such as {missing[0]}; "
                "fetch the model again"
            )
        return tuple(folder / name for name in names)
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = f"; {other[0]} is a pickle, which is not read because it could run code" if other else ""
    raise ModelError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}: convert the weights to safetensors, "
        "or fetch the model again"
    )


def _read_header(path: Path) -> dict[str, TensorInfo]:
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(_HEADER_LENGTH_NBYTES), "little")
        if not 2 <= header_nbytes <= min(_MAX_HEADER_NBYTES, nbytes - _HEADER_LENGTH_NBYTES):
            raise _broken(path, "it does not begin with a safetensors header")
        try:
            entries = json.loads(file.read(header_nbytes))
            entries.pop("__metadata__", None)
            tensors = {name: TensorInfo(e["dtype"], tuple(e["shape"])) for name, e in entries.items()}
            data_nbytes = max((e["data_offsets"][1] for e in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _broken(path, f"its header is damaged ({error})") from error
    expected = _HEADER_LENGTH_NBYTES + header_nbytes + data_nbytes
    if nbytes != expected:
        raise _broken(path, f"it has {nbytes:,} bytes where its header calls for {expected:,}")
    return tensors


def _broken(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is broken: {reason}; fetch the model again")
