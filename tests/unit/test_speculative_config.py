"""The one setting whose keys depend on what it names."""

import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from proposers.ngram import NgramConfig
from proposers.registry import GROUP, known_proposers
from server.config import Config
from server.errors import ConfigError
from server.speculative_config import SpeculativeConfig
from tests.fakes.speculative import speculative_config
from tests.tiny_heads import build_tiny_eagle3, build_tiny_medusa

OUT_OF_TREE = """
from pydantic import Field
from proposers.config import ProposerConfig

class SilenceConfig(ProposerConfig):
    length_s: float = Field(default=1.0, ge=0, description="how long it says nothing")
"""


def refusal(value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_kwargs(speculative_config=value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_given_as_mapping_text_or_object() -> None:
    expected = SpeculativeConfig(proposers=(NgramConfig(method="ngram", num_speculative_tokens=3),))
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    for value in (text, {"method": "ngram", "num_speculative_tokens": 3}, expected):
        assert speculative_config(value) == expected
    assert speculative_config({"num_speculative_tokens": 3}) == expected, "n-gram lookup needs no name"


@pytest.mark.parametrize("value", [None, "none", "None", "null"])
def test_no_speculation(value: object) -> None:
    assert Config.from_kwargs(speculative_config=value).speculative is None


@pytest.mark.parametrize("value", ["auto", "AUTO", " auto", '"auto"'])
def test_what_is_shipped(value: str) -> None:
    assert Config.from_kwargs(speculative_config=value).speculative == "auto"


def test_unknown_key_points_at_the_nearest() -> None:
    assert refusal({"num_spec_tokens": 3}) == (
        "speculative_config.num_spec_tokens: no such setting of ngram; "
        "did you mean num_speculative_tokens? (from argument)"
    )


@pytest.mark.parametrize("count", [0, 33, "x", None])
def test_count_is_limited(count: object) -> None:
    message = refusal({"num_speculative_tokens": count})
    assert message.startswith("speculative_config.num_speculative_tokens: ")
    assert f"must be an integer >= 1 and <= 32, got {count!r}" in message


class TestNumbersAsText:
    """As quotes in a file, or a variable put into one, make them: they are numbers all the same."""

    def test_they_are_taken(self) -> None:
        given = {"num_speculative_tokens": "3", "prompt_lookup_max": "2"}
        assert speculative_config(given) == speculative_config({"num_speculative_tokens": 3, "prompt_lookup_max": 2})
        suffix = {"method": "suffix", "suffix_decoding_max_spec_factor": "2.5"}
        assert speculative_config(suffix) == speculative_config(suffix | {"suffix_decoding_max_spec_factor": 2.5})

    @pytest.mark.parametrize("text", ["three", "2.5", ""])
    def test_other_text_is_not(self, text: str) -> None:
        assert f"must be an integer >= 1 and <= 32, got {text!r}" in refusal({"num_speculative_tokens": text})


class TestNgram:
    def test_window_is_ordered(self) -> None:
        assert refusal({"prompt_lookup_min": 4, "prompt_lookup_max": 3}) == (
            "speculative_config: prompt_lookup_min must be at most prompt_lookup_max (3), got 4 (from argument)"
        )

    def test_small_maximum_alone_lowers_the_minimum(self) -> None:
        config = speculative_config({"prompt_lookup_max": 2}).proposers[0]
        assert isinstance(config, NgramConfig)
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 2)

    @pytest.mark.parametrize("maximum", [0, -1, True])
    def test_bad_maximum_alone_is_refused_by_its_own_name(self, maximum: object) -> None:
        assert refusal({"prompt_lookup_max": maximum}) == (
            f"speculative_config.prompt_lookup_max: must be an integer >= 1 and <= 64, got {maximum!r} (from argument)"
        )


class TestMethods:
    def test_unknown_names_list_the_known_and_the_nearest(self) -> None:
        message = refusal({"method": "n-gram"})
        assert message.startswith("speculative_config.method: must be one of draft_model")
        assert "or module:Class of another; did you mean ngram?, got 'n-gram' (from argument)" in message

    @pytest.mark.parametrize(
        ("method", "words"),
        [
            ("no.such.module:Class", "no.such.module:Class can not be loaded: No module named 'no'"),
            ("proposers.ngram:Nothing", "has no attribute 'Nothing'"),
            ("proposers.ngram:NgramProposer", "is no class of settings"),
            (3, "must be text, got 3"),
        ],
    )
    def test_what_can_not_be_loaded(self, method: object, words: str) -> None:
        assert words in refusal({"method": method})

    def test_a_class_in_place_of_a_name(self) -> None:
        config = speculative_config({"method": "proposers.ngram:NgramConfig", "match": "last"})
        assert config.proposers == (NgramConfig(method="proposers.ngram:NgramConfig", match="last"),)

    def test_other_distributions_bring_theirs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One is installed as pip would do it."""
        (tmp_path / "out_of_tree.py").write_text(OUT_OF_TREE, encoding="utf-8")
        info = tmp_path / "out_of_tree-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: out-of-tree\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nsilence = out_of_tree:SilenceConfig\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        config = speculative_config({"method": "silence", "num_speculative_tokens": 2, "length_s": 1.5})
        assert config.plain() == {"method": "silence", "num_speculative_tokens": 2, "length_s": 1.5}
        assert type(config.proposers[0]).__module__ == "out_of_tree"
        assert refusal({"method": "silence", "length_s": -1}) == (
            "speculative_config.length_s: must be a number >= 0, got -1 (from argument)"
        )
        assert "did you mean silence?" in refusal({"method": "silense"})

    def test_a_name_belongs_to_one(self) -> None:
        ours, same = (EntryPoint("ngram", value, GROUP) for value in ("other:Config", "proposers.ngram:NgramConfig"))
        with pytest.raises(ConfigError, match="two proposers are called ngram"):
            known_proposers([ours])
        assert known_proposers([same, same])["ngram"] == "proposers.ngram:NgramConfig"


class TestWithoutMethod:
    """What was given says which method was probably meant."""

    @pytest.mark.parametrize(
        ("config", "likely"),
        [
            (None, "one of draft_model, eagle, eagle3, medusa"),
            ("{", "one of draft_model, eagle, eagle3, medusa"),
            ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 12}, "draft_model"),
            ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "one of draft_model, eagle"),
            ({"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, "eagle3"),
            ({"speculators_model_type": "eagle"}, "eagle"),
            ({"model_type": "eagle"}, "one of eagle, eagle3"),
            ({"medusa_num_heads": 3}, "medusa"),
        ],
    )
    def test_a_model_s_folder_is_looked_at(self, tmp_path: Path, config: object, likely: str) -> None:
        if config is not None:
            (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        message = refusal({"num_speculative_tokens": 3, "max_model_len": 100, "model": str(tmp_path)})
        assert message.startswith("speculative_config.method: must be given with model ")
        assert message.endswith(f": {likely} (from argument)")

    @pytest.mark.parametrize("build", [build_tiny_eagle3, build_tiny_medusa])
    def test_published_heads_are_known(self, tmp_path: Path, build: Callable[[Path], Path]) -> None:
        message = refusal([{"method": "suffix"}, {"model": str(build(tmp_path))}])
        method = build.__name__.removeprefix("build_tiny_")
        assert message.startswith("speculative_config[1].method: must be given with model ")
        assert message.endswith(f": {method} (from argument)")

    def test_other_settings_have_methods_too(self) -> None:
        assert refusal({"num_layers": 2}) == (
            "speculative_config.method: must be given with num_layers 2: layer_skip (from argument)"
        )
        assert "draft_model, eagle, eagle3, medusa" in refusal({"model": "owner/name"})
        assert refusal({"model": __file__}).split(": ")[-1].removesuffix(" (from argument)") == "draft_model"


class TestLists:
    BOTH = ({"method": "suffix"}, {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "block"})

    def test_members_keep_their_order_and_their_k(self) -> None:
        config = speculative_config(list(self.BOTH))
        assert (config.method, config.num_speculative_tokens) == ("suffix,ngram", 8)
        assert [member.num_speculative_tokens for member in config.proposers] == [8, 3]
        assert speculative_config(json.dumps(self.BOTH)) == config

    def test_the_rule_is_one_for_all(self) -> None:
        config = speculative_config(list(self.BOTH))
        assert config.acceptance.rejection_sample_method == "block"
        assert speculative_config(config.plain()) == config
        message = refusal([{"rejection_sample_method": "block"}, {"rejection_sample_method": "standard"}])
        assert message == (
            "speculative_config[1].rejection_sample_method: is one for all, and is given already (from argument)"
        )

    def test_no_two_are_the_same(self) -> None:
        """Whatever is said in words or left to the defaults."""
        members = [{"method": "suffix"}, {}, {"method": "ngram", "num_speculative_tokens": 5, "policy": "fixed"}]
        assert refusal(members) == (
            "speculative_config[2]: is the same as speculative_config[1], and would never be asked (from argument)"
        )
        assert len(speculative_config([{"match": "first"}, {"match": "last"}]).proposers) == 2

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ('{"method": "ngram", "match": "first", "match": "last"}', "match"),
            ('[{}, {"method": "suffix", "method": "ngram"}]', "method"),
            ('{"num_speculative_tokens_per_batch_size": {"1": 5, "1": 3}}', "1"),
        ],
    )
    def test_a_key_twice(self, text: str, name: str) -> None:
        assert refusal(text) == f"speculative_config: '{name}' is given twice (from argument)"

    def test_refusals_name_the_member(self) -> None:
        assert refusal([{}, {"match": "any"}]).startswith("speculative_config[1].match: must be one of first, last")
        assert refusal([{"method": "sufix"}, {}]).startswith("speculative_config[0].method: must be one of")
        assert "must be a mapping, a list of them, auto or none, got []" in refusal([])
        assert "must be one for each of num_speculative_tokens (8, the largest), got 3" in refusal(
            [{"method": "suffix"}, synthetic(synthetic_acceptance_rates=[0.5, 0.5, 0.1])]
        )


class TestAcceptance:
    def test_standard_unless_said_otherwise(self) -> None:
        assert speculative_config({}).acceptance.rejection_sample_method == "standard"
        block = speculative_config({"rejection_sample_method": "block"})
        assert (block.acceptance.rejection_sample_method, block.acceptance.rates(5)) == ("block", ())
        assert speculative_config(block.plain()) == block

    def test_rates_are_taken_as_they_are(self) -> None:
        rates = [0.9, 0.5, 0.5]
        config = speculative_config({"num_speculative_tokens": 3, **synthetic(synthetic_acceptance_rates=rates)})
        assert config.acceptance.rates(3) == tuple(rates)
        assert speculative_config(config.plain()) == config

    @pytest.mark.parametrize("length", [1, 1.5, 3.25, 6])
    def test_a_length_is_that_of_its_rates(self, length: float) -> None:
        rates = speculative_config(synthetic(synthetic_acceptance_length=length)).acceptance.rates(5)
        assert 1 + sum(rates) == pytest.approx(length)
        assert list(rates) == sorted(rates, reverse=True)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"rejection_sample_method": "greedy"}, "must be one of standard, block, synthetic, got 'greedy'"),
            ({"rejection_sample_method": "synthetic"}, "needs one of synthetic_acceptance_rates and synthetic_acc"),
            (
                {
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": [0.5] * 5,
                    "synthetic_acceptance_length": 2,
                },
                "needs one of synthetic_acceptance_rates and synthetic_acceptance_length",
            ),
            ({"synthetic_acceptance_length": 2}, "synthetic_acceptance_length needs rejection_sample_method synthetic"),
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": "high"},
                "synthetic_acceptance_rates: must be a list of numbers, or none, got 'high'",
            ),
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6, 0.5, 0.5, 0.5]},
                "synthetic_acceptance_rates must not rise",
            ),
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.5, 0.6]},
                "synthetic_acceptance_rates must be from 0 to 1, got [1.5, 0.6]",
            ),
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]},
                "must be one for each of num_speculative_tokens (5, the largest), got 2",
            ),
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6.5},
                "synthetic_acceptance_length must be from 1 to num_speculative_tokens + 1 (6), got 6.5",
            ),
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": float("nan")},
                "synthetic_acceptance_length: must be a number, or none, got nan",
            ),
            ({"rejection_sample_metod": "block"}, "no such setting of ngram; did you mean rejection_sample_method?"),
        ],
    )
    def test_refusals_name_field_and_limits(self, values: dict[str, object], words: str) -> None:
        message = refusal(values)
        assert message.startswith("speculative_config")
        assert words in message
        assert message.endswith("(from argument)")


def synthetic(**values: object) -> dict[str, object]:
    return {"rejection_sample_method": "synthetic", **values}


def test_the_policy_is_one_for_all() -> None:
    config = speculative_config([{"method": "suffix"}, {"method": "ngram", "policy": "fixed"}])
    assert config.policy.policy == "fixed"
    assert speculative_config(config.plain()) == config
    schedule = speculative_config({"num_speculative_tokens_per_batch_size": {"8": 3, "32": 0}})
    assert schedule.policy.num_speculative_tokens_per_batch_size == {8: 3, 32: 0}
    assert speculative_config(schedule.plain()) == schedule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "never"}, r"speculative_config.policy: must be one of auto, fixed, got 'never'"),
        ([{"policy": "auto"}, {"policy": "fixed"}], r"speculative_config\[1\].policy: is one for all"),
        ({"num_speculative_tokens_per_batch_size": {}}, "at least one number of rows"),
        ({"num_speculative_tokens_per_batch_size": {0: 1}}, "from 1 on"),
        ({"num_speculative_tokens_per_batch_size": {4: 33}}, "from 0 to 32 drafts"),
        (
            {"num_speculative_tokens_per_batch_size": {"1": 5, "4": 6}},
            (
                r"speculative_config.num_speculative_tokens_per_batch_size: must have from 0 to 5 drafts, which is "
                r"num_speculative_tokens, for each number of rows, got {1: 5, 4: 6} \(from argument\)"
            ),
        ),
        (
            [{"num_speculative_tokens": 2}, {"method": "suffix", "num_speculative_tokens_per_batch_size": {"1": 9}}],
            "must have from 0 to 8 drafts",
        ),
        ({"num_speculative_tokens_per_batch_size": {4: 2}, "policy": "auto"}, "give one of the two"),
        ({"num_speculative_tokens_per_batch_size": {"few": 2}}, "must be a mapping of integers to integers, or none"),
    ],
)
def test_a_policy_that_is_none(given: object, message: str) -> None:
    assert re.search(message, refusal(given))
