"""Which connector, with which settings, and what a node's role says of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from connectors.filesystem import FilesystemConfig
from connectors.memory import MemoryConfig
from connectors.multi import MultiConfig
from connectors.registry import GROUP, config_class, known_connectors
from server.config import Config, KVTransferConfig
from server.config_sources import resolve
from server.errors import ConfigError
from tests.fakes.example_connectors import PlainFilesConfig

FIELDS_EXAMPLE = KVTransferConfig(
    kv_connector="SharedStorageConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"shared_storage_path": "local_storage"},
)
NULL = {"kv_connector": "null"}
MEMORY = {"kv_connector": "memory"}
TCP = {"kv_connector": "tcp"}
FILES = {"kv_connector": "filesystem", "kv_connector_extra_config": {"shared_storage_path": "kv"}}
OUT_OF_TREE = """
from connectors.null import NullConfig

class NothingConfig(NullConfig):
    how: str = "silently"
"""


def multi(*members: object) -> dict[str, object]:
    return {"kv_connector": "multi", "kv_connector_extra_config": {"connectors": list(members)}}


def faulty(store: object) -> dict[str, object]:
    return {"kv_connector": "fault", "kv_connector_extra_config": {"store": store}}


def read(value: object, **settings: object) -> KVTransferConfig:
    config = Config.from_kwargs(kv_transfer_config=value, **settings).kv_transfer
    assert config is not None
    return config


def refusal(value: object, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_kwargs(kv_transfer_config=value, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_by_default() -> None:
    config = Config.from_kwargs()
    assert (config.kv_transfer, config.disaggregation.role) == (None, "both")


@pytest.mark.parametrize("value", [None, "none", "null"])
def test_nothing_if_asked_for(value: object) -> None:
    assert Config.from_kwargs(kv_transfer_config=value).kv_transfer is None


def test_the_fields_example() -> None:
    """Two scripts of other engines' documentation say exactly this."""
    assert FIELDS_EXAMPLE.settings == FilesystemConfig(shared_storage_path="local_storage")
    assert FIELDS_EXAMPLE.name == "filesystem"
    assert read(FIELDS_EXAMPLE) == FIELDS_EXAMPLE
    assert FIELDS_EXAMPLE.kv_load_failure_policy == "recompute"


def test_given_as_mapping_text_or_object() -> None:
    given = {"kv_connector": "memory", "kv_role": "kv_both", "kv_connector_extra_config": {"max_bytes": "2MiB"}}
    config = read(given)
    assert config.settings == MemoryConfig(max_bytes=2 << 20)
    assert read(json.dumps(given)) == config
    assert read(config.plain()) == config


def test_a_printed_configuration_is_one_again(tmp_path: Path) -> None:
    flags = {
        "kv_transfer_config": json.dumps(FILES),
        "role": "decode",
    }
    first = resolve(flags, {})
    (tmp_path / "again.yaml").write_text(first.render(), encoding="utf-8")
    again = resolve({"config": str(tmp_path / "again.yaml")}, {})
    assert again.config == first.config
    assert again.config.kv_transfer is not None
    assert again.config.kv_transfer.settings == FilesystemConfig(shared_storage_path="kv")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "kv_transfer_config: must be a mapping or none, got []"),
        ('"memory"', "kv_transfer_config: must be a mapping or none, got 'memory'"),
        ('{"kv_connector": "memory", "kv_connector": "null"}', "kv_transfer_config: 'kv_connector' is given twice"),
        ({}, "kv_transfer_config.kv_connector: is missing, must be text not empty"),
        (
            {"kv_connector": "null", "kv_rol": "kv_both"},
            "kv_transfer_config.kv_rol: no such setting; did you mean kv_role?",
        ),
        (
            {"kv_connector": "SharedStorageConnector", "shared_storage_path": "/kv"},
            "kv_transfer_config.shared_storage_path: no such setting; it goes into kv_connector_extra_config",
        ),
        (
            {"kv_connector": "null", "kv_role": "both"},
            "kv_transfer_config.kv_role: must be one of kv_producer, kv_consumer, kv_both, or none, got 'both'",
        ),
        (
            {"kv_connector": "null", "kv_load_failure_policy": True},
            "kv_transfer_config.kv_load_failure_policy: must be one of recompute, fail, got True",
        ),
        (
            {"kv_connector": "null", "kv_connector_extra_config": ["x"]},
            "kv_transfer_config.kv_connector_extra_config: must be a mapping, got ['x']",
        ),
        (
            {"kv_connector": "memory", "kv_connector_extra_config": {"max_byte": 1}},
            "kv_transfer_config.kv_connector_extra_config.max_byte: no such setting; did you mean max_bytes?",
        ),
        (
            {"kv_connector": "filesystem"},
            "kv_transfer_config.kv_connector_extra_config.shared_storage_path: is missing, must be text not empty",
        ),
    ],
)
def test_refusals_name_field_and_limits(value: object, message: str) -> None:
    assert refusal(value) == f"{message} (from argument)"


@pytest.mark.parametrize("name", ["tcp", "nixl"])
def test_what_stays_in_the_cache_is_not_saved_by_layers(name: str) -> None:
    assert refusal({"kv_connector": name, "kv_connector_extra_config": {"layerwise": True}}) == (
        "kv_transfer_config.kv_connector_extra_config.layerwise: no such setting; blocks stay in the cache until "
        "another node reads them, so nothing is saved while it is computed (from argument)"
    )


@pytest.mark.parametrize("engine_id", ["", "a b", "x" * 32, "ö"])
def test_names_of_engines_are_short(engine_id: str) -> None:
    assert refusal({"kv_connector": "null", "engine_id": engine_id}) == (
        "kv_transfer_config.engine_id: must be 1 to 31 letters, digits, dots, dashes and underscores, or none, "
        f"got {engine_id!r} (from argument)"
    )


def test_an_engine_has_another_name_with_each_start() -> None:
    named, unnamed = read({**NULL, "engine_id": "prefill-0"}), read(NULL)
    assert named.new_engine_id().startswith("prefill-0-")
    for config in (named, unnamed):
        assert config.new_engine_id() != config.new_engine_id()
        assert len(config.new_engine_id()) <= 64


def test_blocks_are_exchanged_by_their_content() -> None:
    settings = {"kv_transfer_config": {"kv_connector": "memory"}}
    with pytest.raises(ConfigError, match="kv_transfer_config: needs enable_prefix_caching"):
        Config.from_kwargs(enable_prefix_caching=False, **settings)
    assert Config.from_kwargs(**settings).kv_transfer is not None


def test_text_that_is_no_json() -> None:
    assert refusal("{memory}").startswith("kv_transfer_config: must be a JSON object or none, got '{memory}': ")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: KVTransferConfig(kv_connector="memory", kv_role="x"),
            "KVTransferConfig.kv_role: must be one of kv_producer, kv_consumer, kv_both, or none, got 'x'",
        ),
        (
            lambda: KVTransferConfig(kv_conector="memory"),  # type: ignore[call-arg]
            (
                "KVTransferConfig.kv_connector: is missing, must be text not empty; "
                "KVTransferConfig.kv_conector: no such setting; did you mean kv_connector?"
            ),
        ),
        (
            lambda: KVTransferConfig(kv_connector="memory", kv_connector_extra_config={"max_bytes": "0"}),
            "KVTransferConfig.kv_connector_extra_config.max_bytes: must be an integer >= 1, got '0'",
        ),
        (
            lambda: MemoryConfig(max_bytes=0),
            "MemoryConfig.max_bytes: must be an integer >= 1, got 0",
        ),
    ],
)
def test_a_mistake_in_python_is_told_of_as_on_the_command_line(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made()
    assert str(caught.value) == message


class TestRoles:
    @pytest.mark.parametrize(
        ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")]
    )
    def test_what_kv_does_follows(self, role: str, kv_role: str) -> None:
        config = read(TCP, role=role)
        assert config.kv_role == kv_role
        assert (config.is_producer, config.is_consumer) == (role != "decode", role != "prefill")

    @pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer", "kv_both"])
    def test_a_node_for_everything_may_do_less_with_kv(self, kv_role: str) -> None:
        assert read({**NULL, "kv_role": kv_role}).kv_role == kv_role

    @pytest.mark.parametrize(("role", "wrong"), [("prefill", "kv_consumer"), ("decode", "kv_producer")])
    def test_contradictions(self, role: str, wrong: str) -> None:
        right = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        assert refusal({**TCP, "kv_role": wrong}, role=role) == (
            f"kv_transfer_config.kv_role: must be {right} or kv_both where role is {role}, got '{wrong}'"
        )
        assert read({**TCP, "kv_role": "kv_both"}, role=role).kv_role == "kv_both"

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_half_a_node_needs_a_connector(self, role: str) -> None:
        assert refusal(None, role=role).startswith(f"role: {role} needs kv_transfer_config")

    @pytest.mark.parametrize(
        ("value", "name"),
        [
            (NULL, "null"),
            (MEMORY, "memory"),
            (faulty(MEMORY), "fault"),
            (multi(NULL, MEMORY), "multi"),
            (multi({**TCP, "kv_role": "{wrong}"}, MEMORY), "multi"),
        ],
    )
    @pytest.mark.parametrize(("role", "wrong"), [("prefill", "kv_consumer"), ("decode", "kv_producer")])
    def test_half_a_node_needs_a_connector_to_others(self, value: object, name: str, role: str, wrong: str) -> None:
        message = refusal(json.dumps(value).replace("{wrong}", wrong), role=role)
        can = "that other nodes can read from" if role == "prefill" else "that reads from other nodes"
        assert message == f"role: {role} needs a connector {can}, {name} is none"

    @pytest.mark.parametrize(
        ("value", "out", "into"),
        [
            (NULL, set(), set()),
            (faulty(MEMORY), set(), set()),
            (faulty(FILES), {"fault"}, {"fault"}),
            ({**TCP, "kv_role": "kv_consumer"}, set(), {"tcp"}),
            ({**FILES, "kv_connector": "SharedStorageConnector"}, {"filesystem"}, {"filesystem"}),
            (multi({**TCP, "kv_role": "kv_producer"}, FILES, MEMORY), {"tcp", "filesystem"}, {"filesystem"}),
        ],
    )
    def test_by_what_kv_gets_from_node_to_node(self, value: object, out: set[str], into: set[str]) -> None:
        config = read(value)
        assert (set(config.carriers("out")), set(config.carriers("in"))) == (out, into)

    def test_a_role_that_is_none(self) -> None:
        assert (
            refusal(NULL, role="prefil") == "role: must be one of prefill, decode, both, got 'prefil' (from argument)"
        )


class TestNames:
    def test_unknown_names_list_the_known_and_the_nearest(self) -> None:
        message = refusal({"kv_connector": "filesytem"})
        assert message == (
            "kv_transfer_config.kv_connector: must be one of fault, filesystem, lmcache, memory, multi, nixl, null, "
            "tcp, or module:Class of another; did you mean filesystem?, got 'filesytem' (from argument)"
        )

    @pytest.mark.parametrize(("alias", "name"), [("ExampleConnector", "filesystem"), ("MultiConnector", "multi")])
    def test_what_others_call_them(self, alias: str, name: str) -> None:
        assert config_class(alias) is config_class(name)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("no.such.module:Class", "no.such.module:Class can not be loaded: No module named 'no'"),
            ("connectors.memory:Nothing", "has no attribute 'Nothing'"),
            ("connectors.memory:MemoryStore", "is no class of settings"),
        ],
    )
    def test_what_can_not_be_loaded(self, name: str, words: str) -> None:
        assert words in refusal({"kv_connector": name})

    @pytest.mark.parametrize(
        "choice",
        [
            {"kv_connector": "tests.fakes.example_connectors:PlainFilesConfig"},
            {"kv_connector": "PlainFilesConfig", "kv_connector_module_path": "tests.fakes.example_connectors"},
        ],
    )
    def test_a_class_in_place_of_a_name(self, choice: dict[str, Any]) -> None:
        config = read({**choice, "kv_connector_extra_config": {"folder": "here"}})
        assert config.settings == PlainFilesConfig(folder="here")
        assert "did you mean folder?" in refusal({**choice, "kv_connector_extra_config": {"foldr": "here"}})

    def test_other_distributions_bring_theirs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One is installed as pip would do it."""
        (tmp_path / "kv_out_of_tree.py").write_text(OUT_OF_TREE, encoding="utf-8")
        info = tmp_path / "kv_out_of_tree-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-out-of-tree\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nnothing = kv_out_of_tree:NothingConfig\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        settings = read({"kv_connector": "nothing"}).settings
        assert type(settings).__module__ == "kv_out_of_tree"
        assert "did you mean nothing?" in refusal({"kv_connector": "nothin"})

    def test_a_name_belongs_to_one(self) -> None:
        for name in ("memory", "NixlConnector"):
            with pytest.raises(ConfigError, match=f"two connectors are called {name}"):
                known_connectors([EntryPoint(name, "other:Config", GROUP)])
        same = EntryPoint("memory", "connectors.memory:MemoryConfig", GROUP)
        assert known_connectors([same])["memory"] == "connectors.memory:MemoryConfig"


class TestConnectorsOfConnectors:
    def test_several(self) -> None:
        memory = {"kv_connector": "memory"}
        files = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "here"}}
        config = read({"kv_connector": "multi", "kv_connector_extra_config": {"connectors": [memory, files]}})
        assert isinstance(config.settings, MultiConfig)
        assert [member.settings for member in config.settings.connectors] == [
            MemoryConfig(),
            FilesystemConfig(shared_storage_path="here"),
        ]
        assert read(config.plain()) == config

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"connectors": []}, "connectors: must be a list not empty, got []"),
            ({"connectors": {"kv_connector": "null"}}, "connectors: must be a list of mappings with kv_connector, got"),
            ({"connectors": [3]}, "connectors[0]: must be a mapping with kv_connector, got 3"),
            ({"connectors": [{"kv_connector": "nul"}]}, "connectors[0].kv_connector: must be one of"),
            (
                {"connectors": [{"kv_connector": "null", "kv_load_failure_policy": "fail"}]},
                "connectors[0].kv_load_failure_policy: no such setting",
            ),
            (
                {
                    "connectors": [
                        {"kv_connector": "null"},
                        {"kv_connector": "memory", "kv_connector_extra_config": {"x": 1}},
                    ]
                },
                "connectors[1].kv_connector_extra_config.x: no such setting",
            ),
        ],
    )
    def test_refusals_name_the_member(self, extra: dict[str, Any], message: str) -> None:
        words = refusal({"kv_connector": "multi", "kv_connector_extra_config": extra})
        assert words.startswith(f"kv_transfer_config.kv_connector_extra_config.{message}")

    @pytest.mark.parametrize(
        ("store", "message"),
        [
            ({"kv_connector": "null"}, "store: must name a connector with a store, such as filesystem or memory, got"),
            (
                {"kv_connector": "memory", "kv_connector_extra_config": {"layerwise": True}},
                "store: must have layerwise beside it, not in its own settings, got",
            ),
            ("memory", "store: must be a mapping with kv_connector, got 'memory'"),
            (
                {"kv_connector": "memory", "kv_connector_extra_config": {"max_bytes": 0}},
                "store.kv_connector_extra_config.max_bytes: must be an integer >= 1, got 0",
            ),
        ],
    )
    def test_failures_need_a_store(self, store: object, message: str) -> None:
        words = refusal({"kv_connector": "fault", "kv_connector_extra_config": {"store": store}})
        assert words.startswith(f"kv_transfer_config.kv_connector_extra_config.{message}")


def test_settings_do_not_load_torch() -> None:
    """They are read for `outrider --help`, too, which lists the connectors."""
    words = "import sys, server.config_sources; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True)
