"""Where settings come from: flag > environment > file > default."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from proposers.ngram import NgramConfig
from server.config import SETTING_NAMES, Config
from server.config_sources import ResolvedConfig, add_arguments, resolve
from server.errors import ConfigError
from server.speculative_config import SpeculativeConfig


def _resolve(arguments: str = "", environ: Mapping[str, str] | None = None) -> ResolvedConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(vars(parser.parse_args(arguments.split())), environ or {})


def _refusal(arguments: str = "", environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        _resolve(arguments, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "outrider.yaml"
    path.write_text("port: 3\nmax_num_seqs: 3\nblock_size: 48\n")
    return path


def test_nothing_given_is_the_default() -> None:
    resolved = _resolve()
    assert resolved.config == Config()
    assert set(resolved.sources.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(file: Path) -> None:
    environ = {"OUTRIDER_PORT": "2", "OUTRIDER_MAX_NUM_SEQS": "2", "PATH": "/bin"}
    resolved = _resolve(f"--port 1 --config {file}", environ)
    config, sources = resolved.config, resolved.sources
    assert (config.server.port, sources["port"]) == (1, "flag --port")
    assert (config.scheduler.max_num_seqs, sources["max_num_seqs"]) == (2, "env OUTRIDER_MAX_NUM_SEQS")
    assert (config.cache.block_size, sources["block_size"]) == (48, f"file:{file}")
    assert (config.server.host, sources["host"]) == ("127.0.0.1", "default")


def test_none_is_a_value_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("metrics_port: 9\nmax_model_len: 100\nspeculative_config: {num_speculative_tokens: 2}\n")
    assert _resolve(f"--config {path}").config.observability.metrics_port == 9
    resolved = _resolve(
        f"--config {path} --metrics-port none --speculative-config none", {"OUTRIDER_MAX_MODEL_LEN": "none"}
    )
    assert resolved.config.observability.metrics_port is None
    assert resolved.config.speculative is None
    assert resolved.config.model.max_model_len is None
    assert resolved.sources["metrics_port"] == "flag --metrics-port"


def test_model_is_positional() -> None:
    resolved = _resolve("some/model")
    assert (resolved.config.model.model, resolved.sources["model"]) == ("some/model", "flag MODEL")
    assert _resolve(environ={"OUTRIDER_MODEL": "other"}).config.model.model == "other"


def test_booleans_have_two_flags() -> None:
    assert not _resolve("--no-enable-prefix-caching").config.cache.enable_prefix_caching
    environ = {"OUTRIDER_ENABLE_PREFIX_CACHING": "false"}
    assert not _resolve("", environ).config.cache.enable_prefix_caching
    assert _resolve("--enable-prefix-caching", environ).config.cache.enable_prefix_caching


@pytest.mark.parametrize("in_file", ["{method: ngram, match: last}", '\'{"match": "last"}\''])
def test_speculation_from_each_source(in_file: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"speculative_config: {in_file}\n")
    text = '{"match":"last"}'
    for resolved in (
        _resolve(f"--config {path}"),
        _resolve(environ={"OUTRIDER_CONFIG": str(path)}),
        _resolve(environ={"OUTRIDER_SPECULATIVE_CONFIG": text}),
        _resolve(f"--speculative-config {text}"),
    ):
        assert isinstance(resolved.config.speculative, SpeculativeConfig)
        assert resolved.config.speculative.proposers == (NgramConfig(method="ngram", match="last"),)


def test_every_setting_has_a_flag_and_a_variable() -> None:
    """Each is tried with a value that no type takes, so that its name comes back in the refusal."""
    for name in set(SETTING_NAMES) - {"model"}:
        accepts_any_text = isinstance(Config().flat()[name], str | None)
        assert accepts_any_text or _refusal(environ={f"OUTRIDER_{name.upper()}": "?"}).startswith(f"{name}: ")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    assert {"--" + name.replace("_", "-") for name in set(SETTING_NAMES) - {"model"}} <= flags


def test_an_empty_variable_is_not_set(file: Path) -> None:
    empty = {f"OUTRIDER_{name.upper()}": "" for name in (*Config().flat(), "config")}
    assert _resolve(environ=empty) == _resolve()
    assert _resolve(f"--config {file}", empty) == _resolve(f"--config {file}")
    assert _refusal(environ={"OUTRIDER_PROT": ""}).startswith("OUTRIDER_PROT: no such variable")


def test_refusals_name_their_source(file: Path) -> None:
    file.write_text("port: -1\n")
    assert _refusal(f"--config {file}").endswith(f"got -1 (from file:{file})")
    assert _refusal(environ={"OUTRIDER_PORT": "x"}).endswith("got 'x' (from env OUTRIDER_PORT)")
    assert _refusal("--port 70000").endswith("got '70000' (from flag --port)")


def test_kubernetes_service_links_are_no_settings() -> None:
    links = {
        "OUTRIDER_SERVICE_HOST": "10.0.0.1",
        "OUTRIDER_SERVICE_PORT": "50051",
        "OUTRIDER_SERVICE_PORT_GRPC_API": "50051",
        "OUTRIDER_PORT": "tcp://10.0.0.1:50051",
        "OUTRIDER_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "OUTRIDER_PORT_50051_TCP_PROTO": "tcp",
        "OUTRIDER_PORT_50051_TCP_PORT": "50051",
        "OUTRIDER_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert _resolve(environ=links).config == Config()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OUTRIDER_PORT", "http://10.0.0.1"), ("OUTRIDER_PORTS", "tcp://10.0.0.1:1"), ("OUTRIDER_PORT_1_TCP_HOST", "x")],
)
def test_what_only_resembles_a_service_link_is_refused(variable: str, value: str) -> None:
    assert f"{variable.removeprefix('OUTRIDER_').lower()}" in _refusal(environ={variable: value}).lower()


def test_unknown_names_point_at_the_nearest(file: Path) -> None:
    assert _refusal(environ={"OUTRIDER_MAX_NUM_SEQ": "1"}) == (
        "OUTRIDER_MAX_NUM_SEQ: no such variable; did you mean OUTRIDER_MAX_NUM_SEQS? (from the environment)"
    )
    file.write_text("max-num-seqs: 1\n")
    assert _refusal(f"--config {file}") == (
        f"max-num-seqs: no such setting; did you mean max_num_seqs? (from file:{file})"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"port: [1", "is no valid YAML"),
        (b"- port", "must hold a mapping of settings, not a list"),
        (b"port", "must hold a mapping of settings, not a str"),
        (b"\xff\xfe\xfa", "cannot read"),
        (b"port: 1\nhost: a\nport: 2\n", "port is given twice"),
        (b"speculative_config: {match: first, match: last}", "match is given twice"),
        (b"!!python/object/apply:os.getcwd []", "is no valid YAML"),
    ],
)
def test_unreadable_files(content: bytes, words: str, file: Path) -> None:
    file.write_bytes(content)
    message = _refusal(f"--config {file}")
    assert words in message
    assert str(file) in message


def test_missing_file(tmp_path: Path) -> None:
    assert "No such file" in _refusal(f"--config {tmp_path / 'none.yaml'}")
    assert "cannot read" in _refusal(f"--config {tmp_path}")


def test_empty_file_gives_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert _resolve(f"--config {file}").config == Config()


def test_rendering_is_a_config_file(tmp_path: Path) -> None:
    flags = '--port 7 --chat-template {{x}}#"é😀" --kv-cache-memory-bytes 1GiB --speculative-config {"match":"last"}'
    resolved = _resolve(flags)
    path = tmp_path / "c.yaml"
    path.write_text(resolved.render())
    again = _resolve(f"--config {path}")
    assert again.config == resolved.config
    assert set(again.sources.values()) == {f"file:{path}"}
    lines = resolved.render().splitlines()
    assert len(lines) == len(SETTING_NAMES)
    assert "port: 7" in next(line for line in lines if line.endswith("# flag --port"))
