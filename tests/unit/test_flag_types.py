"""Tests of server.commands.flag_types."""

import argparse
from pathlib import Path

import pytest

from server.commands.flag_types import file_or_text, json_schema, target


def test_file_or_text_is_either(tmp_path: Path) -> None:
    file = tmp_path / "lark"
    file.write_text('start: "a"', encoding="utf-8")
    assert [file_or_text(":")(text) for text in (str(file), 'start: "b"')] == ['start: "a"', 'start: "b"']


def test_a_missing_file_is_named_once() -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        file_or_text(":")("no/such")
    assert str(caught.value) == (
        "'no/such' cannot be read as a file (No such file or directory), and is no text with ':' in it"
    )


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text_is_no_file(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a file or text, and is empty"):
        file_or_text(":")(text)


def test_a_schema_may_be_a_word(tmp_path: Path) -> None:
    file = tmp_path / "schema"
    file.write_text("{}", encoding="utf-8")
    assert [json_schema(text) for text in ("true", "false", "{ }", str(file))] == ["true", "false", "{ }", "{}"]


@pytest.mark.parametrize(
    "text", ["a:1", "127.0.0.1:65535", "[::1]:50051", "unix:/run/outrider.sock", "dns:///a.svc:50051"]
)
def test_a_target_is_left_as_it_is(text: str) -> None:
    assert target(text) == text


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:b", "a:0", "a:65536", "http://a:50051", "https://a:1", "unix:"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give HOST:PORT or unix:PATH, got "):
        target(text)
