"""Tests of server.commands.flag_types."""

import argparse
from pathlib import Path

import pytest

from server.commands.flag_types import file_or_text


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
