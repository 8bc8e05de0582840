"""The prompts that the bundled model was made from."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from worker.bundled.prompts import MIXES, main, prompts

MANY = 100_000


@pytest.mark.parametrize("mix", MIXES)
def test_prompts_are_different_filled_in_and_repeatable(mix: str) -> None:
    rows = prompts(300, 7, mix)
    assert rows == prompts(300, 7, mix)
    assert rows != prompts(300, 8, mix)
    assert len({text for text, _ in rows}) == len(rows) == 300
    assert not any("{" in text or "}" in text or text != text.strip() for text, _ in rows)


@pytest.mark.parametrize(("mix", "least"), [("general", 3000), ("points", 800), ("writing", 500)])
def test_templates_give_all_their_prompts_once(mix: str, least: int) -> None:
    texts = [text for text, _ in prompts(MANY, 1, mix)]
    assert least < len(texts) == len(set(texts)) < MANY


def test_a_general_mix_has_enough_of_what_must_not_fork() -> None:
    kinds = [kind for _, kind in prompts(1800, 1)]
    plain = sum(kinds.count(kind) for kind in ("coding", "maths", "fact", "story", "editing", "brief"))
    assert 0.25 < plain / len(kinds) < 0.6
    assert min(kinds.count("coding"), kinds.count("maths")) > 80


def test_the_command_writes_a_parquet_file(tmp_path: Path) -> None:
    out = tmp_path / "prompts.parquet"
    result = CliRunner().invoke(main, [str(out), "--rows", "20", "--mix", "points"])
    assert result.exit_code == 0, result.output
    assert pq.read_table(out).schema.names == ["prompt", "category"]
    assert pq.read_table(out)["prompt"].to_pylist() == [text for text, _ in prompts(20, 1, "points")]
