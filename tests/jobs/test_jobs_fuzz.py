"""A few hundred damaged inputs of every kind, as `benchmarks.fuzz` makes thousands."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.fuzzing.inputs import KINDS
from benchmarks.fuzzing.run import main


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_end_in_clean_errors(kind: str) -> None:
    result = CliRunner().invoke(main, ["--inputs", "25", "--seed", "7", "--kinds", kind])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["failures"] == found["hangs"] == 0
    assert found.get("taken", 0) + found.get("refused", 0) == 25


def test_an_input_is_made_anew_from_its_seed() -> None:
    from random import Random

    from benchmarks.fuzzing.inputs import make

    for kind in KINDS:
        assert repr(make(kind, Random("7/1"))) == repr(make(kind, Random("7/1")))
