"""The command line at its edge: exit codes, one-line errors, and what is imported."""

import argparse
import os
import subprocess
import sys
import types

import pytest

from server import cli
from server.errors import ConfigError, ModelError


def _command(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Put a command that does `run` in the place of `serve`."""
    module = types.ModuleType("server.commands.serve")

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--max-num-seqs")

    module.__dict__.update(configure=configure, run=run)
    monkeypatch.setitem(sys.modules, "server.commands.serve", module)


def _raise(error: BaseException) -> object:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


def _python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )


def test_arguments_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _command(monkeypatch, lambda args: int(args.max_num_seqs))
    assert cli.main(["serve", "--max-num-seqs", "7"]) == 7


def test_an_interrupted_process_ends_at_once() -> None:
    """An orderly end would tear down threads in the middle of what they compute."""
    program = "import atexit; from server import cli; atexit.register(print, 'the end'); cli.main = lambda: %d; "
    for code, output in ((cli.EXIT_INTERRUPTED, ""), (cli.EXIT_FAILED, "the end\n"), (0, "the end\n")):
        done = _python("-c", program % code + "cli.run_process()")
        assert (done.returncode, done.stdout, done.stderr) == (code, output, "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("port: is wrong"), 2, "outrider: port: is wrong\n"),
        (ModelError("no such model\ntry another"), 1, "outrider: no such model try another\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command(monkeypatch, _raise(error))
    assert cli.main(["serve"]) == code
    assert capsys.readouterr() == ("", line)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _command(monkeypatch, _raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["srve"], "unknown command srve; did you mean serve?"),
        (["version"], "unknown command version; did you mean --version?"),
        (["quux"], f"unknown command quux; there are {', '.join(cli.COMMANDS)}"),
        (["serve", "--model", "m"], "unknown argument --model; write outrider serve MODEL"),
        (["serve", "--model=m"], "unknown argument --model; write outrider serve MODEL"),
        ([], f"a command is required: {', '.join(cli.COMMANDS)}"),
        (["--versio"], "unknown argument --versio; did you mean --version?"),
        (["serve", "--max-num-seq", "4"], "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max-num-seq=4"], "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max-num-seqs"], "argument --max-num-seqs: expected one argument"),
        (["bench", "serve", "--request-rat=4"], "unknown argument --request-rat; did you mean --request-rate?"),
        (["serve", "a", "b"], "unknown argument b"),
        (["serve", "--port", "70000"], "port: must be an integer >= 0 and <= 65535, got '70000' (from flag --port)"),
        (
            ["serve", "--config", "/no/such"],
            "config: cannot read /no/such: [Errno 2] No such file or directory: '/no/such'",
        ),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"outrider: {line}\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out == "outrider 0.1.0\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_print_config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "1")
    assert cli.main(["serve", "--print-config", "--block-size", "64"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["port:", "1", "#", "env", "OUTRIDER_PORT"] in lines
    assert ["block_size:", "64", "#", "flag", "--block-size"] in lines


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys\nfrom server.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'grpc', 'opentelemetry', 'pydantic', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = _python("-c", code)
    assert result.returncode == 0, result.stderr


def test_python_m_server_exits_with_the_code() -> None:
    result = _python("-m", "server", "serve", OUTRIDER_PORT="x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "outrider: port: must be an integer >= 0 and <= 65535, got 'x' (from env OUTRIDER_PORT)\n"


@pytest.mark.parametrize("arguments", [("serve", "--print-config"), ("--help",)])
@pytest.mark.parametrize(
    ("redirection", "words"),
    [
        (">/dev/full", "cannot write the output: No space left on device"),
        (">&-", "standard output is closed"),
    ],
)
def test_output_that_cannot_be_written_is_one_line(arguments: tuple[str, ...], redirection: str, words: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "server", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # argparse keeps to itself what fails while it prints help
    )
    assert (result.returncode, result.stderr) == (1, f"outrider: {words}\n")


@pytest.mark.parametrize("command", [("generate", "-"), ("chat",)])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_input_must_be_utf_8(command: tuple[str, ...], locale: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "server", *command, "--target", "127.0.0.1:1"],
        input=b"caf\xe9\n",
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": locale},
    )
    assert (result.returncode, result.stderr) == (2, b"outrider: standard input is not UTF-8\n")


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "server", "serve", "--print-config"],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")
