"""The `markdown` rules by example: where points fork, and what is no boundary."""

import pytest
from extraction_support import details, extracted, heads, reason

TAIL = " and some more words."


def numbered(*points: str, blank: bool = False) -> str:
    return ("\n\n" if blank else "\n").join(f"{number}. {point}" for number, point in enumerate(points, start=1))


@pytest.mark.parametrize(
    ("point", "head"),
    [
        ("**Sleep**: go to bed early", "**Sleep**:"),
        ("**Sleep:** go to bed early", "**Sleep:**"),
        ("**Sleep** - go to bed early", "**Sleep** -"),
        ("**Sleep** – go to bed early", "**Sleep** –"),
        ("**Sleep.** Go to bed early", "**Sleep.**"),
        ("**Sleep** (2019): go to bed early", "**Sleep** (2019):"),
        ("__Sleep__: go to bed early", "__Sleep__:"),
        ("*Sleep*: go to bed early", "*Sleep*:"),
        ("Sleep: go to bed early", "Sleep:"),
        ("Sleep： go to bed early", "Sleep："),
        ("睡眠：早点睡觉，早点起床，多喝水", "睡眠："),
        ("Sleep - go to bed early", "Sleep -"),
        ("Sleep — go to bed early", "Sleep —"),
        ("Sleep well. Go to bed early", "Sleep well."),
        ("See Dr. Who at 3.5 p.m. on time. Then go home", "See Dr. Who at 3.5 p.m. on time."),
        ("[Site: one](http://a.b/c:d) - a good place", "[Site: one](http://a.b/c:d) -"),
        ("`a: b`: what it is and does", "`a: b`:"),
        ('"Sleep: the movie" is long. Watch it', '"Sleep:'),
        ("At 10:30 we go to sleep. It is late", "At 10:30 we go to sleep."),
        ("Songs (raw - deep: live). All are good", "Songs (raw - deep: live)."),
        ("Sleep\n   Go to bed early", "Sleep"),
        ("Sleep\n\n   Go to bed early.", "Sleep"),
        ("Sleep\n   - go to bed early\n   - get up", "Sleep"),
        ("Sleep:\n   - go to bed early\n   - get up", "Sleep:"),
    ],
)
def test_the_head_of_a_point(point: str, head: str) -> None:
    text = "Tips:\n\n" + numbered(point, point, point)
    assert heads(text) == [f"Tips:\n\n1. {head}", f"\n2. {head}", f"\n3. {head}"]
    assert details(text) == [point.removeprefix(head)] * 3
    assert extracted(text).kind == "list"


def test_bullets_of_every_sort_are_points() -> None:
    for bullet in ("-", "*", "+", "•", "●"):
        text = "\n".join(f"{bullet} Head {i}: the detail of it" for i in range(3))
        assert details(text) == [" the detail of it"] * 3


def test_a_bold_word_in_a_sentence_is_no_title() -> None:
    text = numbered(*["**Paris** is the capital of France. It lies on the Seine."] * 3)
    assert heads(text)[0] == "1. **Paris** is the capital of France."


def test_what_follows_a_list_is_the_last_sibling() -> None:
    text = numbered(*["Head: some detail here."] * 3) + "\n\nIn short, sleep well."
    nodes = extracted(text).nodes or []
    assert text[nodes[-1].start :] == "\n\nIn short, sleep well."


def test_an_unindented_line_behind_a_list_is_not_part_of_its_last_point() -> None:
    text = numbered(*["Head: some detail here."] * 3) + "\nIn short, sleep well."
    assert details(text) == [" some detail here."] * 3


def test_unindented_details_under_numbered_heads_belong_to_their_points() -> None:
    text = "1. First\n\nText of it here.\n\n2. Second\n\nText of it here.\n\n3. Third\n\nText of it here.\n\nThe end."
    assert details(text) == ["\n\nText of it here."] * 3
    text = "1. First:\n- a long point\n- more\n2. Second:\n- a long point\n- more\n3. Third:\n- a long point\n- more"
    assert details(text) == ["\n- a long point\n- more"] * 3


def test_sections_fork_behind_their_headings() -> None:
    text = "# Title\n\n## One\n\nText. More.\n\n- a list\n\n## Two\n\nText of two.\n\n## Three\n\nText of three.\n"
    assert heads(text) == ["# Title\n\n## One", "\n\n## Two", "\n\n## Three"]
    assert details(text) == ["\n\nText. More.\n\n- a list", "\n\nText of two.", "\n\nText of three."]
    assert extracted(text).kind == "section"


def test_titles_in_bold_and_labels_are_headings_too() -> None:
    bold = "\n\n".join(f"**Part {i}**\n\nThe text of part {i}." for i in range(3))
    assert details(bold) == [f"\n\nThe text of part {i}." for i in range(3)]
    labels = "\n\n".join(f"Meal {i}:\n- eggs and ham\n- milk" for i in range(3)) + "\n\nEnjoy your meals."
    assert details(labels) == ["\n- eggs and ham\n- milk"] * 3


def test_the_structure_with_the_shortest_longest_thread_is_taken() -> None:
    """Two levels of headings: the lower one has the shorter bodies."""
    sub = "### Sub {}\n\n" + "Words of this part. " * 5
    text = "\n\n".join(f"## Part {i}\n\n" + "\n\n".join(sub.format(k) for k in range(4)) for i in range(3))
    assert len(details(text)) == 12


def test_paragraphs_fork_behind_their_first_sentences() -> None:
    paragraph = "The first sentence of it, e.g. this one. The second sentence of it."
    text = "A single sentence stays.\n\n" + "\n\n".join([paragraph] * 3)
    assert details(text) == [" The second sentence of it."] * 3
    assert heads(text)[0] == "A single sentence stays.\n\nThe first sentence of it, e.g. this one."
    assert extracted(text).kind == "paragraph"
    assert details(text.replace("\n\n", "\n")) == [" The second sentence of it."] * 3


def test_wrapped_lines_are_one_paragraph() -> None:
    text = "\n\n".join(["The first sentence is wrapped\nover two lines. The second one\nis wrapped as well."] * 3)
    assert details(text) == [" The second one\nis wrapped as well."] * 3


def test_a_sentence_that_announces_what_follows_does_not_fork() -> None:
    paragraph = "The first sentence of it. The second sentence of it."
    text = "Yes, I can help you with that. Here is the letter:\n\n" + "\n\n".join([paragraph] * 3)
    assert len(details(text)) == 3


def test_a_bibliography_does_not_fork() -> None:
    paragraph = "The first sentence of it. The second sentence of it."
    cited = "\n\nReferences\n\nMartin, George. A Dance with Dragons. Bantam Books, 2011."
    assert len(details("\n\n".join([paragraph] * 3) + cited)) == 3


def test_nested_lists_stay_in_their_detail_unless_depth_is_allowed() -> None:
    inner = "".join(f"\n   - Sub {i}: the detail of this one" for i in range(3))
    text = numbered(*[f"**Head**:{inner}"] * 3)
    assert details(text) == [inner] * 3
    nested = details(text, max_depth=2)
    assert nested.count(" the detail of this one") == 9
    assert [detail for detail in nested if detail == inner] == [inner] * 3


def test_trailing_blanks_and_line_ends_of_every_sort_are_kept() -> None:
    for newline in ("\n", "\r\n", "\r"):
        text = newline.join(["Intro:", "", "1. A: the detail", "2. B: the detail", "3. C: the detail", "", "End.", ""])
        assert details(text) == [" the detail"] * 3


def test_short_details_stay_with_their_heads() -> None:
    text = numbered("Head: a long detail", "Head: no", "Head: a long detail", "Head: a long detail")
    assert details(text) == [" a long detail"] * 3
    assert details(text, min_detail_chars=2)[1] == " no"
    assert reason(text, min_detail_chars=30) == (None, "points_without_detail")


CODE = "```python\nx = 1\n```"
PROSE = "The first sentence of it. The second sentence of it."


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("", None, "empty"),
        (" \n ", None, "empty"),
        ("One paragraph. It has two sentences.", "unstructured", "plain"),
        ("Hello.\n\nHow are you?\n\nFine.", "unstructured", "plain"),
        ("\n\n".join([PROSE] * 2), None, "few_paragraphs"),
        (numbered("Apples", "Pears", "Plums"), None, "points_without_detail"),
        (numbered("A: the detail", "B: the detail"), None, "few_points"),
        ("# Title\n\nText.", None, "few_sections"),
        ("You can 1. sit down, 2. stand up, 3. lie down or 4. go.", None, "points_in_a_line"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", None, "table"),
        ("> Somebody said this.", None, "quote"),
        ("Text\n\n***\n\nText", None, "rule"),
        (f"Here it is:\n\n{CODE}\n\n{PROSE}\n\n{PROSE}\n\n{PROSE}", "unstructured", "code"),
        (f"{CODE}\n\n" + numbered(*["A: the detail"] * 3), None, "code_with_list"),
        (f"# Title\n\n{CODE}", None, "code_with_headings"),
        ("# add\ndef add(a, b):\n    return a + b;\n\nx = add(1, 2)\nprint(x)", "unstructured", "code"),
        ("<html>\n<body>\n<div>a</div>\n</body>\n</html>", "unstructured", "code"),
        ("We know that $$x = 1$$ holds.\n\nAnd more.", "unstructured", "maths"),
        ("So 3 + 4 = 7, and 7 * 2 = 14.", "unstructured", "maths"),
        (numbered("A: 3 + 4 = 7 apples", "B: 7 * 2 = 14", "C: 14 - 1 = 13"), None, "maths_with_list"),
        (
            numbered(
                "Pianos: we assume that 2% own one, a total of 100",
                "Tunings: multiplying this by 2 gives us 200",
                "Tuners: dividing by 50 we get 4",
            ),
            None,
            "maths_with_list",
        ),
        (
            numbered("A: add water to it", "B: heat the result from step 1", "C: mix it with the previous result"),
            None,
            "dependent_points",
        ),
        ("Roses are red,\nviolets are blue,\nsugar is sweet\nand so are you", "unstructured", "verse"),
        ("\n\n".join(["Ann: Hello there. How are you?", "Bob: Fine, thanks. And you?"] * 3), None, "dialogue"),
        ("\n\n".join(['"Come in," she said. "It is cold here outside." He came in and sat.'] * 3), None, "dialogue"),
    ],
)
def test_why_an_answer_is_no_tree(text: str, kind: str | None, why: str) -> None:
    assert reason(text) == (kind, why)


def test_answers_longer_than_the_limit_are_dropped_unread() -> None:
    assert reason("a " * 60, max_chars=100) == (None, "too_long")


def test_code_may_stand_outside_the_points_or_be_whole_inside_them() -> None:
    outside = f"{CODE}\n\n" + numbered(*["A: the detail"] * 3)
    inside = "\n\n".join(f"The text before the code. It goes on here:\n\n{CODE}" for _ in range(3))
    assert len(details(outside, code="outside")) == 3
    assert reason(inside, code="outside") == ("unstructured", "code")
    assert details(inside, code="whole") == [f" It goes on here:\n\n{CODE}"] * 3


def test_one_number_or_price_is_not_maths() -> None:
    text = numbered(
        "Cost: about $5 and $10 in 2019-2020", "Time: 24/7, about 3.5 hours", "Share: 50% of them and/or all"
    )
    assert len(details(text)) == 3


def test_an_equals_sign_in_an_address_is_no_equation() -> None:
    text = numbered(*["Site: see https://example.org/?a=1&b=2 for more of it"] * 3)
    assert details(text) == [" see https://example.org/?a=1&b=2 for more of it"] * 3
