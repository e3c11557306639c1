"""Sections of other distributions: whatever their validators do to a value, its refusal is a message."""

from datetime import date
from typing import Any

import pytest
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.config_values import Given, Section, build_section
from server.errors import ConfigError


class Foreign(Section):
    """Settings as somebody else writes them."""

    count: int = Field(default=1, ge=1, description="how many")
    word: str = Field(default="a", description="what")
    day: date | None = Field(default=None, description="when")
    names: list[str] = Field(default=[], description="which")
    other: int = Field(default=1, alias="another", description="under a name of its own")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: dict[str, object]) -> dict[str, object]:
        values = dict(values)
        if "number" in values:
            values["count"] = values.pop("number")
        if values.get("word") == "all":
            raise PydanticCustomError("own_kind", "all is too much")
        if values.get("word") == "any":
            raise AssertionError("say something")
        return values

    @field_validator("word")
    @classmethod
    def _short(cls, word: str) -> str:
        if len(word) > 5:
            raise PydanticCustomError("long_word", "at most {most} letters", {"most": 5})
        if not word:
            raise AssertionError("must say something")
        return word


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": 0}, "own.count: must be an integer >= 1, got 0 (from test)"),
        ({"number": "many"}, "own.count: must be an integer >= 1, got 'many' (from test)"),
        ({"word": "abcdef"}, "own.word: at most 5 letters, got 'abcdef' (from test)"),
        ({"word": ""}, "own.word: must say something, got '' (from test)"),
        ({"word": "all"}, "own: all is too much (from test)"),
        ({"word": "any"}, "own: say something (from test)"),
        ({"day": "soon"}, "own.day: must be a date, or none, got 'soon' (from test)"),
        ({"names": 3}, "own.names: must be a list, got 3 (from test)"),
        ({"names": ["a", 3]}, "own.names: must be a list, got ['a', 3] (from test)"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_section(Foreign, {name: Given(value, "test") for name, value in given.items()}, prefix="own.")
    assert str(caught.value) == message


def test_a_field_by_another_name() -> None:
    with pytest.raises(ConfigError, match=r"^own.another: .*valid integer.*, got 'x' \(from test\)"):
        build_section(Foreign, {"another": Given("x", "test")}, prefix="own.")
