"""Generates the stubs beside the .proto files; with --check, only tells whether they are fresh.

Runs protoc from the repository's root, so that stubs import each other as protos.outrider.v1.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> None:
    """Write the stubs of every .proto of ours below `target`.

    protoc runs in a process of its own: its library and NIXL's do not get on in one.

    Raises: SystemExit with protoc's code; what is wrong stands on stderr.
    """
    sources = sorted(ROOT.glob("protos/outrider/*/*.proto"))
    services = [path for path in sources if "\nservice " in path.read_text(encoding="utf-8")]
    for kinds, paths in ((("python", "pyi"), sources), (("grpc_python",), services)):
        outputs = [f"--{kind}_out={target}" for kind in kinds]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}", *outputs, *map(str, paths)]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(code)


def stale_stubs() -> list[str]:
    """Stubs that differ from what their .proto gives, or lack one; paths from the root."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = _contents(Path(folder))
    committed = _contents(ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("protos/outrider/*/*_pb2*.py*")}


def main() -> None:
    """Generate or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a stub is stale")
    if not parser.parse_args().check:
        generate(ROOT)
    elif stale := stale_stubs():
        sys.exit(f"stale stubs, run `make protos`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
