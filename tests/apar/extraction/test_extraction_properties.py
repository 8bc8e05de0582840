"""What holds for every text: it is restored, the tree tiles it, and nothing that must stay whole is cut."""

import re
from random import Random

import pytest
from extraction_support import extracted
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apar.extraction.blocks import parse
from apar.extraction.options import CODE, RULES
from apar.extraction.protected import Protected

WHOLE = {
    "inline code": "`a. B: c - d`",
    "a link": "[Some text. More: text](http://a.b/c. D: e)",
    "an address": "https://example.org/a.B:c?d=1.2",
    "maths": "$a. B: c_1 = 2$",
    "maths in brackets": r"\(a. B: c\)",
    "a number": "3.141.592:65",
    "an abbreviation": "e.g. This",
    "a title": "Dr. Who",
    "a tag": '<a title="A. B: c">',
}

WORDS = [
    "Sleep",
    "early",
    "The",
    "river",
    "is",
    "wide",
    "and",
    "Paris",
    "42",
    "3.5",
    "e.g.",
    "Ünïcödé",
    "你好",
    "😀",
    "it's",
]
NEWLINES = ["\n", "\n\n", "\n\n", "\r\n", "\n \n"]
CODE_LINES = ["x = 1", "# A. Head: text", "1. **A**: b", "- a", "", "return x"]


class Writer:
    """Writes Markdown by dice. Hypothesis draws one number, the seed: a draw per word would take most of the time."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.calm = seed % 4 > 0
        """Without code and maths, with which few texts become trees."""
        self.whole = [part for name, part in WHOLE.items() if not (self.calm and name.startswith("maths"))]

    def text(self) -> str:
        parts = [self.block() + self.dice.choice(NEWLINES) for _ in range(self.dice.randint(1, 8))]
        return "".join(parts).rstrip("\n" * self.dice.randint(0, 1))

    def block(self) -> str:
        plain, fence = self.plain(), self.dice.choice(["```", "~~~", "````"])
        code = "\n".join(self.dice.choices(CODE_LINES, k=self.dice.randint(0, 5)))
        return self.dice.choice(
            [
                self.sentences(),
                self.sentences(),
                self.points(),
                self.points(),
                f"## {plain}",
                f"**{plain}**",
                f"{plain}:",
                f"> {plain}",
                "---",
                "| A: b | C. D |\n|---|---|\n| 1. E: f | g |",
                *([] if self.calm else [f"{fence}python\n{code}\n{fence}"] * 2),
            ]
        )

    def plain(self) -> str:
        return " ".join(self.dice.choices([*WORDS, *WORDS, *self.whole], k=self.dice.randint(1, 10)))

    def sentence(self) -> str:
        return self.plain() + self.dice.choice([".", ".", "!", "?", "。", "...", ":"])

    def sentences(self) -> str:
        return " ".join(self.sentence() for _ in range(self.dice.randint(1, 4)))

    def points(self) -> str:
        marker, newline = self.dice.choice(["{}. ", "{}) ", "- ", "* ", "• "]), self.dice.choice(NEWLINES)
        return newline.join(marker.format(number) + self.point() for number in range(1, self.dice.randint(2, 6)))

    def point(self) -> str:
        plain = self.plain()
        head = self.dice.choice([f"**{plain}**:", f"**{plain}:**", f"{plain}:", f"{plain} -", self.sentence(), ""])
        text = f"{head} {self.sentences()}"
        for _ in range(self.dice.choice([0, 0, 1, 3])):
            text += f"\n{self.dice.choice(['', '  ', '   ', '    ', chr(9)])}- {self.plain()}: {self.sentences()}"
        return text


markdown = st.integers(0, 2**32).map(lambda seed: Writer(seed).text())


def boundaries(text: str, rules: str, **options: object) -> list[int]:
    nodes = extracted(text, rules, **options).nodes or []
    return sorted({node.start for node in nodes[1:]})


@settings(max_examples=150, deadline=None)
@given(st.text(), st.sampled_from(RULES))
@example("\r1. a: bbbbbbbbbbbb\r2. a: bbbbbbbbbbb\r\n3. a: bbbbbbbbbbbbbb\x00\u2028\x0b\x85", "markdown")
@example("﻿1. a：bbbbbbbbbbbb\n2. a：bbbbbbbbbbb\n3. a：bbbbbbbbbbbbbb", "markdown")
def test_any_text_is_restored(text: str, rules: str) -> None:
    extracted(text, rules)


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet='ab .:-*#`$[]()<>\n\r\t1234_|\\"!?~>•：。é😀\u2028\x0c\xa0', max_size=200),
    st.sampled_from(RULES),
    st.integers(1, 3),
)
@example("1.\r\u2028", "paper", 1)  # a paragraph of white space that is not Markdown's
@example("\xa0\n>:-`$ -", "markdown", 1)
@example("# | a | b |\n|--|--|\n| a | b |\n|--|--|\n\x0c\n\n", "markdown", 1)
def test_any_text_of_the_characters_that_mean_something_is_restored(text: str, rules: str, max_depth: int) -> None:
    extracted(text, rules, max_depth=max_depth, min_points=1, min_detail_chars=1, code="whole")


@settings(max_examples=150, deadline=None)
@given(markdown, st.sampled_from(RULES), st.sampled_from(CODE), st.integers(1, 3))
def test_any_markdown_is_restored_and_its_details_have_substance(text: str, rules: str, code: str, depth: int) -> None:
    outcome = extracted(text, rules, code=code, max_depth=depth)
    nodes = outcome.nodes or []
    for node in nodes:
        if node.first_child is not None:
            end = nodes[node.first_child].end
            for inner in nodes:  # a detail ends where its parent's sibling begins
                if inner.start < nodes[node.next_sibling or 0].start:
                    end = max(end, inner.end)
            assert len(text[node.end : end].strip()) >= 10
    if len(nodes) > 1:
        assert sum(node.first_child is not None for node in nodes) >= 3


@settings(max_examples=150, deadline=None)
@given(markdown, st.integers(1, 3))
def test_no_boundary_falls_into_code_links_maths_or_numbers(text: str, max_depth: int) -> None:
    protected = Protected(text)
    for offset in boundaries(text, "markdown", max_depth=max_depth, min_points=1, min_detail_chars=1, code="whole"):
        assert not protected.holds(offset), text[max(0, offset - 20) : offset + 20]
        assert not re.match(r"\w", text[offset - 1]) or not re.match(r"\w", text[offset : offset + 1] or " ")


@settings(max_examples=150, deadline=None)
@given(markdown, st.integers(1, 3))
def test_no_boundary_falls_into_fences_and_tables(text: str, max_depth: int) -> None:
    blocks = list(parse(text))
    for block in blocks:
        blocks += block.children
    whole = [block for block in blocks if block.type in ("code", "table", "html")]
    for offset in boundaries(text, "markdown", max_depth=max_depth, min_points=1, min_detail_chars=1, code="whole"):
        for block in whole:
            assert not block.start < offset < block.end, text[max(0, offset - 20) : offset + 20]


@pytest.mark.parametrize("whole", WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize(
    "shape", ["Text {} and more. Then the rest.", "Text {} and: then the rest.", "A {} text. The rest."]
)
def test_what_must_stay_whole_is_in_one_node(whole: str, shape: str) -> None:
    text = "\n\n".join(f"{number}. {shape.format(whole)}" for number in range(1, 5))
    nodes = extracted(text, code="whole").nodes or []
    assert sum(text[node.start : node.end].count(whole) for node in nodes) in (0, 4)
