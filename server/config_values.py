"""How one setting is read, and how a refused value is described.

Knows fields and sections, not which ones there are: that is server.config.
"""

import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, cast

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic._internal._model_construction import ModelMetaclass  # it has no public name
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from server.errors import ConfigError
from server.suggestions import did_you_mean

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_BYTES_TEXT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*([a-z]*)")
_LONGEST_QUOTED = 80
_KNOWN_ERRORS = frozenset(typing.get_args(core_schema.ErrorType))
"""Kinds of refusals that pydantic has itself; other ones are of validators, in words of their own."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody gave it, and where: "flag --port", "env OUTRIDER_PORT", "file:PATH", "argument"."""

    value: object
    source: str


def parse_byte_count(value: object) -> object:
    """Read "512MiB", "2GiB", "1e9" or "1.5 GB" as a number of bytes; anything but text passes through.

    Raises: ValueError on text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = _BYTES_TEXT.fullmatch(value.strip().lower())
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError("must be a number of bytes, such as 1073741824, 512MiB, 2GiB or 1e9")
    return int(float(match[1].replace("_", "")) * _BYTE_UNITS[match[2]])


ByteCount = Annotated[int, BeforeValidator(parse_byte_count)]


class _SectionType(ModelMetaclass):
    """Has a section that is made in Python read as one of the command line: mistakes are told of in the same words."""

    def __call__(self, **values: object) -> "Section":
        return read_section(cast("type[Section]", self), values, f"{self.__name__}.")


class Section(BaseModel, metaclass=_SectionType):
    """Settings of one part of the server: frozen, keyword-only, no unknown names.

    Raises: ConfigError that names every refused value and what would be accepted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: object, info: ValidationInfo) -> object:
        """Flags and variables are text: "none" unsets, and a number among choices is that number."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"must be {accepted_values(field)}")  # else True would pass for 1
        if not isinstance(value, str):
            return value
        if accepts_none(field) and value.lower() == "none":
            return None
        return {str(choice): choice for choice in choices(field)}.get(value, value)

    @classmethod
    def hint(cls, name: str, values: Mapping[str, object]) -> str:
        """What to do about an unknown name among these values, as the end of a sentence; may be empty."""
        return did_you_mean(name, cls.model_fields)


SectionT = TypeVar("SectionT", bound=Section)


def accepts_none(field: FieldInfo) -> bool:
    """Whether the setting may be unset."""
    return type(None) in typing.get_args(field.annotation)


def choices(field: FieldInfo) -> tuple[object, ...]:
    """The values of a closed choice, empty for every other kind of field."""
    return typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ()


def accepted_values(field: FieldInfo) -> str:
    """What a field takes, to follow the words "must be"."""
    if options := choices(field):
        return "one of " + ", ".join(map(str, options))
    annotation: object = field.annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation))) + ", or none"
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    kinds: dict[object, str] = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        tuple[float, ...]: "a list of numbers",
        dict[int, int]: "a mapping of integers to integers",
    }
    kind = kinds.get(annotation) or _kind_of_type(annotation)
    limits = " and ".join(_limits(field.metadata))
    return " ".join(filter(None, [kind, limits])) + (", or none" if accepts_none(field) else "")


def _kind_of_type(annotation: object) -> str:
    """What sections of other distributions may have besides."""
    container = typing.get_origin(annotation) or annotation
    if container in (tuple, list, set, frozenset):
        return "a list"
    if container in (dict, Mapping) or (isinstance(container, type) and issubclass(container, BaseModel)):
        return "a mapping"
    return f"a {getattr(container, '__name__', container)}"


def _limits(metadata: Iterable[object]) -> Iterable[str]:
    """The limits in words, to be joined by "and"."""
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=limit):
                yield f">= {limit}"
            case annotated_types.Gt(gt=limit):
                yield f"> {limit}"
            case annotated_types.Le(le=limit):
                yield f"<= {limit}"
            case annotated_types.Lt(lt=limit):
                yield f"< {limit}"
            case annotated_types.MultipleOf(multiple_of=step):
                yield f"a multiple of {step}"
            case annotated_types.MinLen():
                yield "not empty"


def quoted(value: object) -> str:
    """A value for a one-line message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTED else text[:_LONGEST_QUOTED] + "..."


def build_section(section: type[SectionT], given: Mapping[str, Given], *, prefix: str = "") -> SectionT:
    """The section with the given values over its defaults.

    Args:
        given: by field name; the names may be unknown.
        prefix: goes before field names in messages, such as "speculative_config.".
    Raises: ConfigError that names every refused value, where it came from and what would be accepted.
    """
    values = {name: item.value for name, item in given.items()}
    try:
        return section.model_validate(values)
    except ValidationError as error:
        problems = []
        for name, rule in refusals(section, values, error):
            source = (given.get(name) or next(iter(given.values()))).source
            problems.append(f"{(prefix + name).rstrip('.')}: {rule} (from {source})")
        raise ConfigError("; ".join(problems)) from None


def read_section(section: type[SectionT], values: Mapping[str, object], path: str) -> SectionT:
    """The section with these values over its defaults.

    Args: path: goes before field names in messages; validators that read sections in this one have it from `path_of`.
    Raises: ConfigError that names every refused value and what would be accepted.
    """
    try:
        return section.model_validate(values, context=path)
    except ValidationError as error:
        problems = [f"{(path + name).rstrip('.')}: {rule}" for name, rule in refusals(section, values, error)]
        raise ConfigError("; ".join(problems)) from None


def path_of(info: ValidationInfo) -> str:
    """What goes before the names of the fields of a section that is being read."""
    return info.context or ""


def refusals(section: type[Section], values: Mapping[str, object], error: ValidationError) -> list[tuple[str, str]]:
    """Of each refused value the field and what would be accepted; no field for a rule about several, which names them.

    Args: values: what the section was to be made of.
    """
    return [_refusal(section, values, details) for details in error.errors()]


def _refusal(section: type[Section], values: Mapping[str, object], details: ErrorDetails) -> tuple[str, str]:
    """Validators may have renamed, made up or refused anything: nothing of `values` need be there."""
    own_words = _own_words(details)
    if not details["loc"]:
        return "", own_words or details["msg"]
    name = str(details["loc"][0])
    if details["type"] == "extra_forbidden":
        return name, f"no such setting{section.hint(name, values)}"
    field = section.model_fields.get(name)
    accepted = details["msg"] if field is None else f"must be {accepted_values(field)}"
    if details["type"] == "missing":
        return name, f"is missing, {accepted}"
    return name, f"{own_words or accepted}, got {quoted(values.get(name, details['input']))}"


def _own_words(details: ErrorDetails) -> str:
    """What a validator said itself; empty where pydantic did."""
    if details["type"] in ("value_error", "assertion_error"):
        return str(details["ctx"]["error"]) or details["msg"]
    return "" if details["type"] in _KNOWN_ERRORS else details["msg"]
