"""Imports point one way, and no file grows beyond reading.

Parses every import, those in functions and TYPE_CHECKING blocks included.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("clients", "connectors", "proposers", "protos", "server")
MAX_LINES = 500

LEAVES = (
    "connectors.base",
    "connectors.choice",
    "connectors.config",
    "connectors.rare_log",
    "connectors.registry",
    "connectors.save_failure",
    "proposers.base",
    "proposers.config",
    "proposers.registry",
    "server.config",
    "server.config_json",
    "server.config_sources",
    "server.config_values",
    "server.engine.protocol",
    "server.errors",
    "server.events",
    "server.guidance.grammar",
    "server.guidance.params",
    "server.host",
    "server.kv_description",
    "server.kv_handle",
    "server.kv_transfer_config",
    "server.passing_thread",
    "server.plan",
    "server.request",
    "server.speculation_state",
    "server.speculative_config",
    "server.suggestions",
    "server.temporary_folder",
    "server.token_logprobs",
    "server.version",
)
"""May be imported by all but clients and protos, and import only each other."""

EVERYTHING = ("clients", "connectors", "proposers", "protos", "server")

ARROWS: dict[str, tuple[str, ...]] = {
    "clients": ("protos",),
    "connectors": ("protos",),
    "proposers": ("server.kernels", "server.model"),
    "proposers.training": ("proposers", "server.kernels", "server.llm", "server.model"),
    "protos": (),
    "server.__main__": ("server.cli",),
    "server.cli": ("server.commands",),
    "server.commands": (
        *("clients", "protos", "server.compose", "server.serving", "server.model.resolve", "server.preprocess"),
        "server.scheduler.draft_policy",  # which its benchmark compares
        "server.kernels.huge_pages",  # where blocks are that a benchmark moves
    ),
    "server.compose": EVERYTHING,
    "server.composition": (
        *("proposers.draft_model", "proposers.drafting", "proposers.eagle_compiled", "proposers.eagle_network"),
        *("proposers.network", "proposers.shipped", "server.kernels", "server.model", "server.worker"),
    ),
    "server.continuation_check": (),
    "server.engine": ("server.scheduler",),
    "server.guidance": ("server.tokenizer",),
    "server.kernels": (),
    "server.kv": (),
    "server.llm": ("clients", "server.compose", "server.preprocess"),
    "server.model": ("server.kernels", "server.tokenizer"),
    "server.preprocess": ("server.continuation_check", "server.guidance", "server.tokenizer"),
    "server.rpc": ("protos", "server.engine", "server.preprocess"),
    "server.scheduler": ("server.kv",),
    "server.serving": ("server.compose", "server.rpc", "server.telemetry"),
    "server.telemetry": (),
    "server.tokenizer": (),
    "server.worker": ("proposers.chain", "proposers.network", "server.guidance", "server.kernels", "server.model"),
}
"""What each part may import besides itself and the leaves. A new part needs a line here."""

FORBIDDEN_LIBRARIES: dict[str, tuple[str, ...]] = {
    "server.engine": ("grpc", "torch", "transformers"),
    "server.kv": ("asyncio", "grpc", "torch", "transformers"),
    "server.scheduler": ("asyncio", "grpc", "torch", "transformers"),
    "server.worker": ("asyncio", "grpc", "opentelemetry"),
    "server.model": ("asyncio", "grpc", "opentelemetry"),
    "proposers": ("asyncio", "grpc", "opentelemetry"),
}

CLIENT_LIBRARIES = {"google", "grpc", "grpc_status"} | sys.stdlib_module_names
"""All that the outrider-client distribution may need."""


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def _imports(module: str) -> Iterator[str]:
    """Every module that one imports, as the name of a file of ours where it is one."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield member if member in FILES and node.module != "server" else node.module


GRAPH = {module: sorted(set(_imports(module)) - {module}) for module in FILES}


def _is_in(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def _part_of(module: str) -> str | None:
    """The part that a module belongs to: the longest name in ARROWS that covers it."""
    return max((part for part in ARROWS if _is_in(module, part)), key=len, default=None)


def _may_import(module: str, target: str) -> bool:
    if module in LEAVES:
        return target in LEAVES
    part = _part_of(module)
    assert part is not None, f"{module} belongs to no part: add one to ARROWS"
    if target in LEAVES and part not in ("clients", "protos"):
        return True
    return any(_is_in(target, allowed) for allowed in (part, *ARROWS[part]))


@pytest.mark.parametrize("module", sorted(set(FILES) - {"server"}))
def test_imports_follow_the_arrows(module: str) -> None:
    ours = [target for target in GRAPH[module] if target.partition(".")[0] in PACKAGES]
    assert [target for target in ours if not _may_import(module, target)] == []


def test_no_import_cycles() -> None:
    graph = {module: [target for target in targets if target in FILES] for module, targets in GRAPH.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert set(order) == set(FILES)


def test_nothing_imports_the_package_itself() -> None:
    """`from server import X` pulls in the whole offline API; users may, our own modules may not."""
    assert [module for module, targets in GRAPH.items() if "server" in targets] == []


@pytest.mark.parametrize("part", FORBIDDEN_LIBRARIES)
def test_parts_stay_clear_of_libraries(part: str) -> None:
    found = {
        f"{module} imports {target}"
        for module, targets in GRAPH.items()
        if _is_in(module, part) and module not in LEAVES
        for target in targets
        if any(_is_in(target, library) for library in FORBIDDEN_LIBRARIES[part])
    }
    assert found == set()


def test_clients_need_little() -> None:
    libraries = {target.partition(".")[0] for module in GRAPH if _is_in(module, "clients") for target in GRAPH[module]}
    assert libraries - CLIENT_LIBRARIES == {"clients", "protos"} & libraries


def test_files_are_short() -> None:
    others = (("tests", "*.py"), ("scripts", "*.py"), ("protos", "*.proto"))
    sources = [*FILES.values(), *(path for folder, pattern in others for path in (ROOT / folder).rglob(pattern))]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources
        if "_pb2" not in path.name
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
