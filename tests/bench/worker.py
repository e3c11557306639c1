"""Keeps an engine loaded and answers one measured round per line.

worker.py ENGINE MODEL OPTIONS: engine_ENGINE.py beside this file, a model, and options as JSON. It is
run by an interpreter that may have none of our packages. Lines of JSON on stdin and stdout:
first {package: version}, then for each {"prompts": [[id, ...], ...], "output_len": n} a Sample.
"""

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    """Load, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to stdout, too
    _, name, model, options = sys.argv
    engine: Any = importlib.import_module(f"engine_{name}").Engine(model, **json.loads(options))

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(engine.versions)
    for line in sys.stdin:
        answer(engine.measure(**json.loads(line)))


if __name__ == "__main__":
    main()
