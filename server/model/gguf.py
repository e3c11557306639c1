"""Turns a GGUF file into a standard Hugging Face folder, once.

The rest of the server then knows one format only, and a start costs no conversion.
"""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from server.errors import ModelError
from server.model.progress import spinner, without_foreign_bars

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerBase

MAGIC = b"GGUF"

# Splits every digit off, as these vocabularies were trained. transformers leaves it out for them,
# and text such as "  12" then becomes other tokens than the model has seen in training.
_SINGLE_DIGIT_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


def is_gguf(path: Path) -> bool:
    """Whether the file starts like a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation config of `source` into `folder`.

    Weights are dequantised. Files of mostly float32 or float16 keep that type; all others are
    stored in bfloat16, which is what they are served in by default: half the disk and page cache
    of float32, and its rounding (2^-9) is small beside that of 4 to 8 bit weights. A float32 run
    widens the same stored values, so comparisons with other engines on this folder stay exact.

    Raises: ModelError if the file is broken or of an architecture that transformers cannot read.
    """
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        with spinner(f"converting {source.name}, once"), without_foreign_bars():
            reader = GGUFReader(source)
            dtype = _stored_dtype(reader)
            loaded = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                dtype=dtype,
                # With a kernel package installed, transformers would otherwise keep the blocks packed.
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUFReader and transformers raise whatever the bytes lead them to: ValueError, KeyError, IndexError, ...
    except Exception as error:
        raise ModelError(
            f"cannot convert {source}: {str(error) or type(error).__name__}; the file is broken, or its architecture "
            "is not one that transformers reads from GGUF: fetch it again, or use the model's safetensors folder"
        ) from error

    # transformers refuses to save a model that came from a GGUF file: a fresh one of the same
    # configuration takes its tensors over, without a copy.
    config = loaded.config
    for origin in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(origin, None)
    config.architectures = [type(loaded).__name__]
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    _correct_tokenizer(reader, tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    with without_foreign_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _write_generation_config(folder, reader)


def _stored_dtype(reader: "GGUFReader") -> torch.dtype:
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += tensor.n_elements
    commonest = max(sizes, key=lambda name: sizes[name])
    return {"F32": torch.float32, "F16": torch.float16}.get(commonest, torch.bfloat16)


def _correct_tokenizer(reader: "GGUFReader", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Put right what some versions of transformers read otherwise than the file means it."""
    from tokenizers import decoders, pre_tokenizers

    for name in ("bos", "eos", "padding", "unknown"):
        if (token_id := _field(reader, f"{name}_token_id")) is not None:
            attribute = {"padding": "pad", "unknown": "unk"}.get(name, name)
            setattr(tokenizer, f"{attribute}_token", tokenizer.convert_ids_to_tokens(token_id))
    if (adds_bos := _field(reader, "add_bos_token")) is not None:
        tokenizer.add_bos_token = adds_bos
    tokenizer.clean_up_tokenization_spaces = False  # would take spaces away that the model has written
    if _field(reader, "model") != "gpt2":
        return
    # Bytes to text and nothing else: other decoders drop a space at the beginning.
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if _field(reader, "pre") in _SINGLE_DIGIT_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _write_generation_config(folder: Path, reader: "GGUFReader") -> None:
    """GGUF has no generation config; its special ids are what one needs to know when to stop."""
    # Chat models end a turn by "eot", which need not be the end of a text.
    ends = [_field(reader, f"{name}_token_id") for name in ("eos", "eot")]
    entries = {
        "bos_token_id": _field(reader, "bos_token_id"),
        "pad_token_id": _field(reader, "padding_token_id"),
        "eos_token_id": [token_id for token_id in dict.fromkeys(ends) if token_id is not None],
    }
    present = {name: value for name, value in entries.items() if value not in (None, [])}
    (folder / "generation_config.json").write_text(json.dumps(present, indent=2) + "\n")


def _field(reader: "GGUFReader", name: str) -> Any:
    """One of the file's tokenizer entries; None if it has no such entry."""
    field = reader.get_field(f"tokenizer.ggml.{name}")
    return None if field is None else field.contents()
