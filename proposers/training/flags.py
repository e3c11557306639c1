"""Command line flags out of settings classes, and settings out of flags."""

import argparse
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import ConfigError

_Settings = TypeVar("_Settings", bound=BaseModel)


def add_flags(parser: argparse.ArgumentParser, settings: type[BaseModel]) -> None:
    """A flag for each field, with its help, default and choices; values stay strings, which `build` checks."""
    for name, field in settings.model_fields.items():
        words = field.description or ""
        options: dict[str, Any] = {"dest": name, "required": field.is_required()}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = name.upper()
            if typing.get_origin(_without_none(field.annotation)) is tuple:
                options["nargs"] = "+"
            if not field.is_required() and field.default not in (None, ()):
                words += f" (default: {field.default})"
        parser.add_argument(_flag(name), help=words.replace("%", "%%"), default=argparse.SUPPRESS, **options)


def build(settings: type[_Settings], args: argparse.Namespace) -> _Settings:
    """Settings from parsed flags; those not given have their defaults. Raises: ConfigError naming every mistake."""
    given = {name: getattr(args, name) for name in settings.model_fields if hasattr(args, name)}
    try:
        return settings.model_validate(given)
    except ValidationError as error:
        problems = [f"{_flag(str(each['loc'][0]))}: {each['msg']}, got {each['input']!r}" for each in error.errors()]
        raise ConfigError("; ".join(problems)) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _without_none(annotation: Any) -> Any:
    """T of `T | None`."""
    parts: Sequence[Any] = [part for part in typing.get_args(annotation) if part is not type(None)]
    return parts[0] if len(parts) == 1 and type(None) in typing.get_args(annotation) else annotation
