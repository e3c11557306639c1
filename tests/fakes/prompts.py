"""The prompts that answers are checked on, as token ids of whatever model."""

import json
from pathlib import Path
from typing import Any

PROMPTS_FILE = Path(__file__).parent.parent / "data" / "prompts.json"


def load_prompts(tokenizer: Any, limit: int) -> list[list[int]]:
    """All 50, in the file's order: chat, code, repetitive, other scripts, one token, at the context limit.

    An entry with `room` is repeated until only so many tokens of `limit` are left to generate.
    """
    prompts = []
    for entry in json.loads(PROMPTS_FILE.read_text(encoding="utf-8")):
        text, room = entry["text"], entry.get("room")
        if entry["kind"] == "chat":
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer.encode(text)
        if room is not None:
            token_ids = (token_ids * limit)[: limit - room]
        elif entry["kind"] == "single":
            token_ids = token_ids[:1]
        prompts.append(token_ids)
    return prompts
