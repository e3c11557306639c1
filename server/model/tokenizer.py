"""Loads the tokenizer and the chat template that goes with it."""

import sys
from pathlib import Path

import jinja2
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from server.config import ModelConfig
from server.errors import ConfigError, ModelError, first_line
from server.model.no_tokenizer import has_tokenizer

_NO_LIMIT = sys.maxsize


def load_tokenizer(folder: Path, config: ModelConfig, *, vocab_size: int) -> PreTrainedTokenizerBase:
    """The model's own tokenizer or the one given in its place, with the chat template given, if any.

    Args:
        folder: of the model.
        vocab_size: ids of another tokenizer must be below this.

    Raises: ModelError if there is none or it does not fit; ConfigError if the chat template cannot be used.
    """
    source = str(folder) if config.tokenizer is None else _given_source(config.tokenizer)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # each tokenizer class fails in its own way
        raise _load_error(source, error) from error
    if config.tokenizer is not None and (highest := max(tokenizer.get_vocab().values(), default=0)) >= vocab_size:
        raise ModelError(
            f"tokenizer {source} has ids up to {highest}, the model's vocabulary ends at {vocab_size - 1}; "
            "use the tokenizer the model was trained with"
        )
    # Requests are checked against the context of what is served; transformers would only add a warning of its own.
    tokenizer.model_max_length = _NO_LIMIT
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
        _check_template(tokenizer)
    return tokenizer


def _given_source(given: str) -> str:
    """A folder, or else a hub id."""
    path = Path(given).expanduser()
    if (path.is_absolute() or given.startswith(".")) and not path.is_dir():
        raise ModelError(f"--tokenizer {given}: no such folder; name one that holds a tokenizer, or a hub id")
    return str(path)


def _read_template(given: str) -> str:
    """The file's text if there is such a file, else the text itself if it looks like a template."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {given}: cannot be read as a file ({error}), and is no Jinja text, which would "
            "contain {{ or {%"
        ) from error


def _check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template is not valid Jinja, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError:
        pass  # a template may refuse this very conversation, for example because it asks for a system message


def _load_error(source: str, error: Exception) -> ModelError:
    if "trust_remote_code" in str(error):
        return ModelError(
            f"tokenizer {source} brings Python code of its own, which is not run unasked: read it, then pass "
            "--trust-remote-code"
        )
    reason = first_line(error)
    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        reason = "the folder has none"
    return ModelError(
        f"cannot load a tokenizer from {source}: {reason}; for the model that is served, --tokenizer names a folder "
        "or hub id that has one"
    )
