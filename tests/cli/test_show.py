"""`forq show`: the tree on the terminal and as SVG, of answers that are well-behaved and of answers that are not."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from cli_support import Forq

from db.session import Database
from jobs import leases, results
from jobs.drawing import draw_request
from jobs.errors import Conflict, Unavailable
from jobs.settings import DEFAULT_MODEL
from jobs.show import print_request

SVG = "{http://www.w3.org/2000/svg}"
# (parent, kind, thread, first step, last step, text); a detail inside a detail, and one that says nothing.
TREE = [
    (None, "root", 0, 0, 4, "Three tips:\n\n1. Eat"),
    (0, "detail", 1, 5, 9, ": well"),
    (1, "detail", 2, 10, 12, " (greens)"),
    (1, "sibling", 1, 10, 14, " and often."),
    (0, "sibling", 0, 5, 8, "\n2. Sleep"),
    (4, "detail", 3, 9, 9, ""),
    (4, "sibling", 0, 9, 11, "\nDone."),
]


def tree_of(rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    at = tokens = 0
    for number, (parent, kind, thread, first, last, text) in enumerate(rows):
        size = last - first + 1 if text else 0
        nodes.append(
            {
                "node": number, "parent": parent, "kind": kind, "thread": thread, "start": tokens, "end": tokens + size,
                "first_step": first, "last_step": last, "text_start": at, "text_end": at + len(text), "text": text,
            }
        )  # fmt: skip
        at, tokens = at + len(text), tokens + size
    return nodes


def detail_of(rows: list[tuple[Any, ...]], num_samples: int = 1, **values: Any) -> dict[str, Any]:
    """As `jobs.service.request_detail` gives it."""
    nodes = tree_of(rows)
    sample = {
        "output": "".join(node["text"] for node in nodes), "finish_reason": "stop", "prompt_tokens": 3,
        "output_tokens": nodes[-1]["end"], "stats": {"threads": 4, "steps": 15}, "tree": nodes, "turns": [],
    }  # fmt: skip
    samples = [{"sample": number, **sample} for number in range(num_samples)]
    said = {"job_id": "J", "row": 0, "id": None, "state": "completed", "error_code": None, "error": None}
    return {**said, "samples": samples, **values}


def texts_of(svg: Path) -> list[str]:
    return [" ".join((text.text or "").split()) for text in ElementTree.parse(svg).iter(f"{SVG}text")]


def test_details_are_below_what_forked_them_and_siblings_on_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    print_request(detail_of(TREE))
    lines = capsys.readouterr().out.splitlines()
    depths = [(line.index(word), word) for line in lines for word in re.findall(r"(root|detail|sibling), thread", line)]
    levels = sorted({depth for depth, _ in depths})
    assert [(levels.index(depth), word) for depth, word in depths] == [
        (0, "root"), (1, "detail"), (2, "detail"), (1, "sibling"), (0, "sibling"), (1, "detail"), (0, "sibling")
    ]  # fmt: skip
    assert lines[1] == "sample 0: 25 tokens, stop, 4 threads, 15 steps"
    assert "thread 2, tokens 10-13, steps 10-12" in "\n".join(lines)
    for _, _, _, _, _, text in TREE:
        for part in text.split("\n"):
            assert any(part.strip() in line for line in lines)


def test_an_answer_of_hundreds_of_siblings_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chain = [(None, "root", 0, 0, 0, "a")] + [(n, "sibling", 0, n, n, "b") for n in range(400)]
    print_request(detail_of(chain))
    assert capsys.readouterr().out.count("sibling") == 400
    draw_request(detail_of(chain), tmp_path / "x.svg")
    assert len(texts_of(tmp_path / "x.svg")) > 400


def test_text_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(None, "root", 0, 0, 1, "a\x1b[2J\x1b]0;title\x07\x9b31m[bold]b[/bold]")]
    print_request(detail_of(rows, id="q\x1b[31m"))
    print_request(detail_of(rows, samples=[], error_code="engine_error", error="\x1b[5m"))
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)
    assert "[bold]b[/bold]" in out  # and no markup is read from it


def test_an_answer_without_a_tree_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    value = detail_of(TREE)
    value["samples"][0] |= {"stats": None, "tree": []}
    print_request(value)
    assert "2. Sleep" in capsys.readouterr().out


def test_the_drawing_has_every_node_and_every_thread_as_text(tmp_path: Path) -> None:
    draw_request(detail_of(TREE, num_samples=2), tmp_path / "x.svg")
    texts = texts_of(tmp_path / "x.svg")
    assert texts.count("2 · 3 tokens · (greens)") == 2
    assert "0 · 5 tokens · Three tips: 1. Eat" in texts
    assert [text for text in texts if text.startswith("thread ")] == [f"thread {n}" for n in range(4)] * 2
    assert "row 0, sample 1: 25 tokens, 4 threads, 15 engine steps" in texts
    assert texts.count("engine steps since the first token") == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "x.svg"]


HOSTILE = {
    "$x^2$ costs $5 and \\frac{a}{b": "$x^2$ costs $5 and \\frac{a}{b",
    "</text><script>alert(1)</script>&amp;]]>": "</text><script>alert(1)</script>&amp;]]>",
    "日本語 عربى 🍅": "日本語 عربى 🍅",
    "\x00\x1b\x0b\ufffe\uffff\x85": "␀␛␋\ufffd\ufffd\ufffd",
    "$\\undefined{": "$\\undefined{",
    "word " * 400: "word word word",
    "\u202e evil": "\u202e evil",
    "%s {0} %(x)s": "%s {0} %(x)s",
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items(), ids=range(len(HOSTILE)))
def test_hostile_text_stays_text_in_a_valid_drawing(tmp_path: Path, text: str, shown: str) -> None:
    draw_request(detail_of([(None, "root", 0, 0, 3, "a"), (0, "detail", 1, 4, 9, text)]), tmp_path / "x.svg")
    assert not list(ElementTree.parse(tmp_path / "x.svg").iter(f"{SVG}script"))
    assert any(shown in found for found in texts_of(tmp_path / "x.svg"))


def test_the_same_answer_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_request(detail_of(TREE), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_cannot_be_drawn_says_why_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="row 0 is queued: there is no tree to draw"):
        draw_request(detail_of(TREE, samples=[], state="queued"), tmp_path / "x.svg")
    with pytest.raises(Unavailable, match="cannot be written"):
        draw_request(detail_of(TREE), tmp_path / "nowhere" / "x.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def answered(home: Path, run: Forq, prompts: Path) -> str:
    """A job of three rows, two answered with the tree above; as a worker would have stored them."""
    job: str = json.loads(run("submit", prompts, "--json").out)["job_id"]
    database = Database(f"sqlite:///{home / 'forq.db'}")
    lease = leases.acquire(database, DEFAULT_MODEL, "O" * 26, 60.0)
    assert lease is not None
    stats = results.Stats(4, 3, 3, 15, 20, 2, 300, 33, 555, 0)
    nodes = tuple(
        results.Node(**{name: value for name, value in node.items() if name != "text"}) for node in tree_of(TREE)
    )
    text = "".join(row[-1] for row in TREE)
    sample = results.SampleResult(text, "stop", 3, 30, stats, nodes)
    rows = results.load(database, lease).rows[:2]
    results.write(database, lease, [results.RowResult(row.request_id, (sample,)) for row in rows])
    database.dispose()
    return job


def test_show_prints_draws_and_tells_all_as_json(run: Forq, answered: str) -> None:
    shown = run("show", answered, "1", "--svg", "tree.svg")
    assert shown.exit_code == 0
    assert "2. Sleep" in shown.out
    assert "drawn to tree.svg" in shown.err
    assert "0 · 4 tokens · 2. Sleep" in texts_of(Path("tree.svg"))
    (sample,) = json.loads(run("show", answered, "1", "--json").out)["samples"]
    assert [node["text"] for node in sample["tree"]] == [row[-1] for row in TREE]
    assert sample["output"] == "".join(node["text"] for node in sample["tree"])
    refused = run("show", answered, "2", "--svg", "no.svg")
    assert (refused.exit_code, refused.err) == (1, "forq: row 2 is queued: there is no tree to draw\n")
    assert not Path("no.svg").exists()


def test_an_answer_that_was_drafted_is_shown_with_its_decoders_figures(capsys: pytest.CaptureFixture[str]) -> None:
    value = detail_of([(None, "root", 0, 0, 1, "a")])
    figures = {
        "forwards": 12, "hit_rate": 0.75, "acceptance_length": 2.5, "decoding_efficiency": 1.917, "draft_nodes": 80,
        "verify_nodes": 1,
    }  # fmt: skip
    value["samples"][0]["stats"] |= figures
    print_request(value)
    assert "4 threads, 15 steps; 12 forwards, DE 1.92, HR 0.75, AL 2.50, 80 draft nodes, 1 verified node" in " ".join(
        capsys.readouterr().out.split()
    )


def test_stats_tell_what_was_saved(run: Forq, answered: str) -> None:
    said = json.loads(run("stats", answered, "--json").out)
    assert (said["num_samples"], said["forked_samples"], said["mean_threads"], said["max_threads"]) == (2, 2, 4.0, 4)
    assert (said["steps"], said["sequential_steps"], said["steps_saved_percent"]) == (30, 60, 50.0)
    assert said["peak_saved_percent"] == pytest.approx(100 * (1 - 20 / 33), abs=0.01)
    lines = dict(line.split("\t", 1) for line in run("stats", answered).out.splitlines())
    assert lines["engine steps"] == "30\t60\t50.0"
    assert lines["answers that forked"] == "2\t0\t"
    assert not any(line.startswith(("forwards", "hit rate")) for line in lines)


def test_stats_of_a_drafted_job_end_with_its_decoders_figures(home: Path, run: Forq, prompts: Path) -> None:
    job: str = json.loads(run("submit", prompts, "--json").out)["job_id"]
    database = Database(f"sqlite:///{home / 'forq.db'}")
    lease = leases.acquire(database, DEFAULT_MODEL, "O" * 26, 60.0)
    assert lease is not None
    rows = results.load(database, lease).rows
    for row, efficiency in zip(rows, (1.0, 2.0, 4.5), strict=True):
        stats = results.Stats(1, 0, 1, 2, 5, 1, 9, 5, 9, 0, 2, 0.5, 1.5, efficiency, 10, 4)
        sample = results.SampleResult("x", "stop", 3, 2, stats, ())
        results.write(database, lease, [results.RowResult(row.request_id, (sample,))])
    database.dispose()
    lines = dict(line.split("\t", 1) for line in run("stats", job).out.splitlines())
    assert [lines[name] for name in ("forwards", "tokens per forward (DE), mean", "hit rate (HR), mean")] == [
        "6\t\t", "2.5\t1\t", "0.5\t\t"
    ]  # fmt: skip
    assert (lines["draft nodes"], lines["verified nodes"]) == ("30\t\t", "12\t\t")
