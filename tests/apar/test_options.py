"""What may be said about forking, by whom, and what is refused with which words."""

import math
from typing import Any

import pytest

from apar.options import (
    MAX_SEED,
    ControlTokens,
    EngineOptions,
    ForkLimits,
    OptionError,
    RequestOptions,
    child_seed,
    engine_options,
    request_options,
)

# The engine


def test_a_model_folder_names_its_control_tokens_and_limits() -> None:
    options = engine_options({"fork_token_id": 5, "child_token_id": 6, "max_depth": 1}, None)
    assert options == EngineOptions(ControlTokens(fork=5, child=6), ForkLimits(max_width=32, max_forks=64, max_depth=1))


def test_the_engine_has_the_last_word_key_by_key() -> None:
    model = {"fork_token_id": 5, "child_token_id": 6, "max_depth": 1, "max_forks": 10}
    options = engine_options(model, {"child_token_id": 7, "max_depth": 3})
    assert options == EngineOptions(ControlTokens(fork=5, child=7), ForkLimits(max_forks=10, max_depth=3))


@pytest.mark.parametrize("nothing", [None, {}])
def test_without_control_tokens_nothing_forks(nothing: Any) -> None:
    assert engine_options(nothing, nothing) == EngineOptions(None, ForkLimits())


def test_an_engine_can_take_a_models_control_tokens_away() -> None:
    options = engine_options({"fork_token_id": 5, "child_token_id": 6}, {"fork_token_id": None, "child_token_id": None})
    assert options.control is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"fork_token_id": 5}, "go together"),
        ({"child_token_id": 6}, "go together"),
        ({"fork_token_id": 5, "child_token_id": 5}, "both 5"),
        ({"fork_token_id": -1, "child_token_id": 5}, "fork_token_id is -1"),
        ({"fork_token_id": 5, "child_token_id": "6"}, "child_token_id is '6'"),
        ({"fork_token_id": True, "child_token_id": 6}, "fork_token_id is True"),
        ({"fork_token_id": 5.0, "child_token_id": 6}, "fork_token_id is 5.0"),
        (
            {"max_widht": 3},
            "max_widht is not an option: use child_token_id, fork_token_id, max_depth",
        ),
        ({"max_width": 0}, "max_width is 0: use a whole number, at least 1"),
        ({"max_forks": -1}, "max_forks is -1: use a whole number, at least 0"),
        ({"max_depth": 1.5}, "max_depth is 1.5"),
        ({"max_depth": True}, "max_depth is True"),
        ({"max_forks": None}, "max_forks is None"),
        ({"max_forks": "4"}, "max_forks is '4'"),
        ("on", "is 'on': use a mapping"),
        ([1], "use a mapping"),
    ],
)
def test_an_engine_option_that_cannot_be_used_is_named(said: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        engine_options(None, said)
    with pytest.raises(OptionError, match=message):
        engine_options(said, None)


# A request


@pytest.mark.parametrize("extra_args", [None, {}, {"apar": None}, {"apar": {}}, {"apar": True}, {"replay": "x"}])
def test_a_request_that_says_nothing_forks_within_the_engines_limits(extra_args: Any) -> None:
    assert request_options(extra_args) == RequestOptions(fork=True, pool=None, pool_share=1.0)


@pytest.mark.parametrize("said", [False, 0, {"fork": False}])
def test_a_request_may_refuse_to_fork(said: Any) -> None:
    assert request_options({"apar": said}).fork is False


def test_a_request_names_limits_and_a_pool() -> None:
    said = {"max_width": 2, "max_forks": 0, "max_depth": 1, "pool": "job", "pool_share": 0.25}
    assert request_options({"apar": said, "replay": "x"}) == RequestOptions(True, 2, 0, 1, "job", 0.25)
    assert request_options({"apar": {"pool_share": 1}}).pool_share == 1


def test_a_request_only_lowers_limits() -> None:
    limits = ForkLimits(max_width=8, max_forks=20, max_depth=2)
    assert limits.lowered(RequestOptions()) == limits
    assert limits.lowered(RequestOptions(max_width=99, max_forks=99, max_depth=99)) == limits
    assert limits.lowered(RequestOptions(max_width=1, max_forks=0, max_depth=0)) == ForkLimits(1, 0, 0)
    assert limits.lowered(RequestOptions(max_forks=5)) == ForkLimits(8, 5, 2)


def test_no_forks_at_all_is_no_depth_either() -> None:
    """Otherwise the answer would end, cut, where its first fork would be."""
    assert ForkLimits(max_forks=0, max_depth=3).max_depth == 0
    assert ForkLimits(max_depth=3).lowered(RequestOptions(max_forks=0)).max_depth == 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"widht": 1}, "extra_args.apar.widht is not an option"),
        ({"max_width": 0}, "max_width is 0"),
        ({"max_forks": -1}, "max_forks is -1"),
        ({"max_depth": True}, "max_depth is True"),
        ({"max_depth": 1.5}, "max_depth is 1.5"),
        ({"max_width": 64.5}, "max_width is 64.5"),  # not whole, though above every limit
        ({"max_width": "2"}, "max_width is '2'"),
        ({"max_forks": [2]}, "max_forks is"),
        ({"max_width": math.nan}, "max_width is nan"),
        ({"pool": 7}, "pool is 7"),
        ({"pool": ["job"]}, "pool is"),
        ({"pool_share": 0}, "pool_share is 0"),
        ({"pool_share": 1.01}, "pool_share is 1.01"),
        ({"pool_share": math.nan}, "pool_share is nan"),
        ({"pool_share": "half"}, "pool_share is 'half'"),
        ({"pool_share": True}, "pool_share is True"),
        ({"fork": 1}, "fork is 1"),
        ({1: 2, "widht": 3}, "is not an option"),
        ([1], "use a mapping"),
        (0.5, "use a mapping"),
        (2, "use a mapping"),
    ],
)
def test_a_request_option_that_cannot_be_used_is_named(said: Any, message: str) -> None:
    # Anything but an OptionError would end the engine for everybody.
    with pytest.raises(OptionError, match=message):
        request_options({"apar": said})


def test_over_http_the_options_come_as_json_text() -> None:
    """`vllm_xargs` of vLLM's OpenAI server takes texts, numbers and lists of them, no mappings."""
    said = '{"max_forks": 3, "pool": "job"}'
    assert request_options({"apar": said}) == RequestOptions(max_forks=3, pool="job")
    assert request_options({"apar": "false"}).fork is False
    with pytest.raises(OptionError, match="off"):
        request_options({"apar": "off"})


# Seeds


def test_a_childs_seed_follows_from_its_path_alone() -> None:
    # Written down once: answers sampled with a seed must be the same in the next release.
    assert child_seed(0, 0) == 3153696582655363665
    assert child_seed(1234, 2) == 8286714753716622686


def test_no_two_threads_of_a_request_share_a_seed() -> None:
    seeds = [17]
    for parent in [17, *(child_seed(17, ordinal) for ordinal in range(64))]:
        seeds.extend(child_seed(parent, ordinal) for ordinal in range(64))
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
