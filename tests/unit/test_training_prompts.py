"""Prompts: what they are made of, how they are split, that nothing is measured on what is trained on."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from proposers.training.overlap import NGRAM, ngrams_of, shares_ngram
from proposers.training.passages import code_pieces, prose_pieces, read_passages
from proposers.training.prompt_file import PromptRecord, prompt_ids, read_prompts, write_prompts
from proposers.training.prompts import PromptSettings, make_prompts
from proposers.training.templates import templates
from server.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HANDWRITTEN = ROOT / "tests" / "data" / "handwritten_prompts.json"
PROSE = (
    "The harbour was quiet in the morning. A few boats lay at anchor, and gulls walked along the wall. Nobody spoke "
    "much before the first coffee, which the old cook made in a pot as large as a bucket."
)
CODE = "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result\n"


def settings(tmp_path: Path, **changes: object) -> PromptSettings:
    given: dict[str, object] = {
        "sources": (ROOT / "docs", ROOT / "server", ROOT / "proposers"),
        "output": tmp_path / "prompts.jsonl",
        "num_prompts": 600,
        "heldout_share": 0.1,
        **changes,
    }
    return PromptSettings.model_validate(given)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[PromptRecord]:
    return make_prompts(settings(tmp_path_factory.mktemp("prompts"), exclude=(HANDWRITTEN,)))


def test_prompts_are_a_function_of_files_and_seed(tmp_path: Path, prompts: list[PromptRecord]) -> None:
    assert make_prompts(settings(tmp_path, exclude=(HANDWRITTEN,))) == prompts
    assert make_prompts(settings(tmp_path, exclude=(HANDWRITTEN,), seed=1)) != prompts


def test_there_are_many_kinds_and_no_prompt_twice(prompts: list[PromptRecord]) -> None:
    kinds = Counter(prompt.kind for prompt in prompts)
    assert min(kinds["chat"], kinds["prose"], kinds["code"]) > 30
    assert {prompt.task for prompt in prompts} == {*templates().frames, "continue"}
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert any(len(prompt.turns) == 3 for prompt in prompts)
    assert {prompt.kind for prompt in prompts if prompt.task == "code_openings"} == {"code"}
    assert not any(re.search(r"\{[a-z_]+\d?\}", prompt.turns[0]) for prompt in prompts if prompt.task == "questions")


def test_training_prompts_share_no_13_gram_with_what_is_measured_on(prompts: list[PromptRecord]) -> None:
    held_out = [prompt for prompt in prompts if prompt.split == "heldout"]
    assert 10 < len(held_out) < len(prompts) / 3
    known = ngrams_of(turn for prompt in [*held_out, *read_prompts(HANDWRITTEN)] for turn in prompt.turns)
    assert known
    assert not any(shares_ngram(prompt.turns, known) for prompt in prompts if prompt.split == "train")


def test_an_excluded_text_costs_the_prompts_that_quote_it(tmp_path: Path, prompts: list[PromptRecord]) -> None:
    quoted = max((prompt.text for prompt in prompts if prompt.split == "train"), key=len)
    excluded = tmp_path / "excluded.json"
    excluded.write_text(json.dumps({"deep": [quoted]}))
    kept = make_prompts(settings(tmp_path, exclude=(HANDWRITTEN, excluded)))
    assert quoted not in {prompt.text for prompt in kept}


def test_ngrams_are_of_words_and_marks() -> None:
    words = " ".join(f"word{i}" for i in range(NGRAM))
    assert shares_ngram(["So: " + words.upper().replace(" ", "\n") + "!"], ngrams_of([words]))
    assert not shares_ngram([words.replace(" ", ", ")], ngrams_of([words]))
    assert ngrams_of([" ".join(words.split()[1:])]) == set()


def test_no_template_has_an_ngram_of_its_own() -> None:
    """Else one held-out prompt would cost all others of that template."""
    turns = [turn for frames in templates().frames.values() for frame in frames for turn in frame]
    assert len(turns) > 250
    for turn in turns:
        assert not ngrams_of(re.split(r"\{[a-z]+(?:_\d)?\}", turn)), turn


def test_pieces_are_whole_sentences_and_whole_lines() -> None:
    assert list(prose_pieces("Title\n\n" + PROSE + "\n\nToo short.\n\n" + PROSE.upper())) == [PROSE, PROSE.upper()]
    assert list(prose_pieces("x = 3; y[4] = 5 + {6: 7}\n" * 20)) == []
    assert list(prose_pieces(PROSE.replace("boats", "Copyright boats"))) == []
    assert list(code_pieces("# comment\n\n" + CODE + "\nx = 1\n")) == [CODE.rstrip()]


def test_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.html").write_text(f"<html><head><title>no</title></head><p>{PROSE}</p><pre>{CODE}</pre></html>")
    (tmp_path / "b.py").write_text(CODE)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(PROSE.replace("quiet", "busy").encode()))
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": PROSE.replace("quiet", "cold")}) + "\n")
    (tmp_path / "e.png").write_bytes(b"\x89PNG")
    (tmp_path / "f.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "g.txt").write_text(PROSE)
    found = read_passages([tmp_path], per_file=3)
    busy, cold = PROSE.replace("quiet", "busy"), PROSE.replace("quiet", "cold")
    assert [(piece.kind, piece.text) for piece in found] == [
        ("prose", PROSE),
        ("code", CODE.rstrip()),
        ("prose", busy),
        ("prose", cold),
    ]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_files_of_prompts_come_back(tmp_path: Path, prompts: list[PromptRecord], name: str) -> None:
    write_prompts(tmp_path / name, prompts)
    assert read_prompts(tmp_path / name) == prompts
    first = (tmp_path / name).read_bytes()
    write_prompts(tmp_path / name, prompts)
    assert (tmp_path / name).read_bytes() == first


@pytest.mark.parametrize(
    "content", ["\x00", "no json", '{"kind": "chat"}', '{"kind": "poem", "task": "x", "turns": ["a"]}']
)
def test_broken_files_of_prompts_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(path)


def test_sources_without_code_are_refused(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text(PROSE)
    with pytest.raises(ConfigError, match="both prose and source code"):
        make_prompts(settings(tmp_path, sources=(tmp_path,)))


def test_handwritten_prompts_are_fifty_of_every_kind() -> None:
    prompts = read_prompts(HANDWRITTEN)
    kinds = Counter(prompt.kind for prompt in prompts)
    assert (len(prompts), set(kinds)) == (50, {"chat", "prose", "code"})
    assert {prompt.split for prompt in prompts} == {"handwritten"}
    assert len({prompt.task for prompt in prompts}) > 15
    assert all(len(prompt.turns) % 2 for prompt in prompts)


class Tokenizer:
    """Says what it was given."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[object]:
        return [text, add_special_tokens]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "|".join(f"{message['role']}: {message['content']}" for message in messages)


def test_chat_prompts_go_through_the_template() -> None:
    chat = PromptRecord("chat", "x", "train", ("a", "b", "c"))
    assert prompt_ids(chat, Tokenizer()) == ["user: a|assistant: b|user: c", False]
    assert prompt_ids(PromptRecord("code", "x", "train", ("def f",)), Tokenizer()) == ["def f", True]
