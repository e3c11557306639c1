"""The digest that says whose KV may be mixed with whose."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from server.host import cpu_count
from server.kv_description import describe
from server.model.weights import WeightFiles

# Raise it whenever the meaning of a stored KV block changes.
KV_FORMAT_VERSION = 1

_CHUNK_NBYTES = 32 << 20

# What makes KV of equal weights differ, by what people call it. The rest of the configuration either follows from the
# weights or changes nothing in K and V.
_CONFIG_FIELDS = {
    "model": ("model_type",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "hidden_size": ("hidden_size",),
    "rope": ("rope_parameters",),
    "positions": ("max_position_embeddings",),
    "attention": ("layer_types", "sliding_window"),
    "quantisation": ("quantization_config",),
}
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_NUM_DIGITS = 12
"""Of a digest that stands for what is no number or word: enough for people, who have the fingerprint as well."""


def weights_digest(weights: WeightFiles) -> str:
    """Hex; equal for equal files, in order, wherever they are."""
    return hashlib.sha256(b"".join(digest_file(path) for path in weights.paths)).hexdigest()


def fingerprint(digest: str, config: PreTrainedConfig, dtype: torch.dtype) -> bytes:
    """SHA-256 over weights, KV geometry, rope, quantisation, computation type and format version.

    The same in every process and on every machine for the same files: it depends neither on
    paths nor on the number of threads that computed it. It says nothing of the cache, see kv_fingerprint.

    Args: digest: see weights_digest.
    """
    described = config.to_dict()
    canonical = json.dumps(
        {
            "format": KV_FORMAT_VERSION,
            "weights": digest,
            "dtype": str(dtype).removeprefix("torch."),
            **{field: described.get(field) for fields in _CONFIG_FIELDS.values() for field in fields},
        },
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(canonical.encode()).digest()


def kv_fingerprint(model: bytes, kv_dtype: torch.dtype) -> bytes:
    """Of the KV that a model with this fingerprint leaves in a cache of that type: equal where it can be exchanged."""
    return hashlib.sha256(model + str(kv_dtype).removeprefix("torch.").encode()).digest()


def describe_kv(digest: str, config: PreTrainedConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """What `fingerprint` and `kv_fingerprint` follow from, each part by itself; see server.kv_description."""
    described = config.to_dict()
    return describe(
        {
            "format": KV_FORMAT_VERSION,
            "dtype": str(dtype).removeprefix("torch."),
            "kv_dtype": str(kv_dtype).removeprefix("torch."),
            "weights": digest[:_NUM_DIGITS],
            **{name: _short([described.get(field) for field in fields]) for name, fields in _CONFIG_FIELDS.items()},
        }
    )


def _short(values: list[object]) -> str:
    """A number or a word as it is, none for nothing, a digest of anything else."""
    if all(value is None for value in values):
        return "none"
    if len(values) == 1 and _PLAIN.fullmatch(str(values[0])):
        return str(values[0])
    canonical = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_NUM_DIGITS]


def digest_file(path: Path) -> bytes:
    """SHA-256 over the SHA-256 of each 32 MiB chunk; all CPUs work at once, as hashing drops the GIL.

    Every byte is read: a sample would take two fine-tunings of one model for the same.
    """
    offsets = range(0, path.stat().st_size, _CHUNK_NBYTES)
    with ThreadPoolExecutor(cpu_count(), thread_name_prefix="digest") as pool:
        chunks = pool.map(lambda offset: _digest_chunk(path, offset), offsets)
        return hashlib.sha256(b"".join(chunks)).digest()


def _digest_chunk(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.sha256(file.read(_CHUNK_NBYTES)).digest()
