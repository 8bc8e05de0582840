"""Whoever has keys instead of flags reads keys."""

from jobs.flags import keys_for_flags

KEYS = ["prompt_column", "prompt", "model", "n"]


def test_flags_become_keys_and_commands_stay() -> None:
    said = "give --prompt-column, not --prompt: see `forq worker --model NAME`; --model and --n, but --name and x--n"
    assert keys_for_flags(said, KEYS) == (
        "give prompt_column, not prompt: see `forq worker --model NAME`; model and n, but --name and x--n"
    )


def test_a_message_without_flags_is_the_same() -> None:
    for said in ("", "nothing", "a ` alone and --other", "--prompt-columns"):
        assert keys_for_flags(said, KEYS) == said
