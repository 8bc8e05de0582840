"""The `paper` rules by example."""

import pytest
from extraction_support import details, extracted, heads, reason

LIST = "Tips:\n\n1. Sleep: go to bed early\n2. Eat: have some fruit\n3. Walk: go out at noon\n\nThe end."
PARAGRAPH = "The first sentence of this paragraph. The second sentence of this paragraph."


def test_an_ordered_list_forks_behind_its_colons() -> None:
    assert heads(LIST, "paper") == ["Tips:\n\n1. Sleep:", "\n2. Eat:", "\n3. Walk:"]
    assert details(LIST, "paper") == [" go to bed early", " have some fruit", " go out at noon"]
    assert extracted(LIST, "paper").kind == "list"
    assert len(details(LIST.replace(":", "："), "paper")) == 3


def test_paragraphs_fork_behind_their_first_full_stops() -> None:
    text = "\n\n".join([PARAGRAPH] * 3)
    assert details(text, "paper") == [" The second sentence of this paragraph."] * 3
    assert extracted(text, "paper").kind == "paragraph"


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        (LIST.replace("early", "10"), "list", None),
        (LIST.replace("go to bed early", "go"), None, "few_points"),
        (LIST.replace("3. Walk: go out at noon", ""), None, "few_points"),
        (LIST.replace("noon", "noon\n   1. or at one"), None, "few_points"),
        (LIST.replace("noon", "http://noon"), None, "url"),
        (LIST.replace("noon", "<noon>"), None, "markup_with_list"),
        (LIST.replace("noon", "x=1"), None, "maths_with_list"),
        (LIST + "\n```\nx\n```", None, "code_with_list"),
        (LIST.replace("noon", "正午"), None, "cjk"),
        ("\n\n".join([PARAGRAPH] * 2), None, "few_paragraphs"),
        (
            "\n\n".join([PARAGRAPH, PARAGRAPH, "Mr. Smith went out on a walk. He came home late."]),
            None,
            "few_paragraphs",
        ),
        ("One paragraph. It has two sentences.", "unstructured", "plain"),
        ("```\nx\n```", "unstructured", "code"),
        ("It is x = 1.", "unstructured", "maths"),
    ],
)
def test_what_the_paper_takes_and_what_not(text: str, kind: str | None, why: str | None) -> None:
    assert reason(text, "paper") == (kind, why)
