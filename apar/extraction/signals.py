"""What kind of answer a text is where its structure must not fork: code, maths, calculation, dialogue, verse.

Each test is about the whole answer. Coding and maths answers are worth their weight as negatives; a dialogue or a poem
is written line after line, each of which needs the one before.
"""

import re
from collections import Counter

from apar.extraction.blocks import Block

_CODE_LINE = re.compile(
    r"^[ \t]*(?:(?:def|class|import|from|return|public|private|static|function|const|let|var|for|while|if|elif|else|try"
    r"|catch|#include|using|package|SELECT|INSERT|UPDATE|CREATE|</?[a-z]{1,20}[^>\n]{0,200}>)\b"
    r".{0,300}[;:{}()>=][ \t]*$"
    r"|.{0,300}[;{}][ \t]*$"
    r"|[\w.\[\]]{1,60}[ \t]*[+:]?=[ \t]*\S.{0,300}$"
    r"|[)\]}]+[;,]?[ \t]*$"
    r"|//.{0,300}$"
    r"|[\w.]{1,60}\(.{0,200}\);?[ \t]*$)",
    re.MULTILINE,
)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_ADDRESS = re.compile(r"(?:https?://|ftp://|www\.)[^\s<>]+|<[A-Za-z/][^<>\n]{0,400}>")
"""Addresses and tags: their equals signs mean no equation."""
_LATEX = re.compile(r"\$\$|\\(?:\(|\[|begin\{|frac|sqrt|sum|int|cdot|times|alpha|beta|theta|infty|le|ge|mathbb|text\{)")
_INLINE_MATHS = re.compile(r"(?<![\w$\\])\$(?=[^\s$])[^$\n]{0,300}[\\^_={}][^$\n]{0,300}\$(?![\w$])")
_EQUATION = re.compile(
    r"(?:\d|\b[A-Za-z]|\))\s?[%°²³]?\s?[=≈≤≥]\s?[-−$€£(]?\s?(?:\d|[A-Za-z]\b|√)"
    r"|[\w)%] = [\w($€£√-]|^= ?\S"
    r"|[\w)] [*×·÷] [\w($]|\d ?[×÷*^] ?[$(]?\d|\d x \d|\d ?[+] ?[$(]?\d|\d\s[-−/]\s\d[^\n]{0,40}="
    r"|[∑∫√∂∇∀∃∈⊆ε]|\bO\([\w^²√ ]{1,12}\)",
    re.MULTILINE,
)
_CALCULATION = re.compile(
    r"\b(?:multipl(?:y|ied|ying)|divid(?:e|ed|ing)|subtract(?:ed|ing)?|add(?:ing|ed)? (?:up|these|those|them)"
    r"|we (?:get|have|find|obtain|would get|can calculate|can estimate)|(?:gives|giving) us|comes? out to|equals?"
    r"|is equal to|result(?:s|ing) in|total of|let'?s (?:assume|say|call)|assum(?:e|ing) (?:that|an?)"
    r"|therefore,? (?:the|we|there))\b[^.\n]{0,120}\d"
    r"|\d[^.\n]{0,60}\b(?:times|divided by|multiplied by|minus|equals)\b[^.\n]{0,60}\d",
    re.IGNORECASE,
)
_DEPENDENT = re.compile(
    r"\b(?:(?:from|in|of|by|using|with|after) (?:the )?(?:previous|preceding|last|first|above) "
    r"(?:step|result|point|equation|calculation)s?|(?:from|in|of|with|per) step \d"
    r"|(?:this|that|the above) (?:equation|result) )",
    re.IGNORECASE,
)
_SPEAKER = re.compile(
    r"^[ \t]*(?:\*\*|\*|__)?([A-Z][\w .'’-]{0,28})(?:\*\*|\*|__)?(?:\s?\([^()\n]{0,40}\))?:(?:\*\*|\*|__)?[ \t]+\S",
    re.MULTILINE,
)
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9-]{0,20}(?:\s[^<>\n]{0,300})?/?>")
_TAGS_OF_PROSE = re.compile(r"</?(?:br|b|i|u|em|strong|sub|sup|p|s|small|kbd|mark)\b[^<>]{0,40}>", re.I)
_SAID = re.compile(
    r"[\"”] ?(?:(?:he|she|they|I|we|it|[A-Z]\w{1,20}|the \w{1,20}) )?(?:said|asked|replied|whispered|answered|shouted"
    r"|cried|exclaimed|murmured|muttered|laughed|says|asks|replies)\b"
    r"|\b(?:said|asked|replied|whispered|answered|shouted|cried|exclaimed|murmured|says|asks)[,:] ?[\"“]"
)
_SENTENCE_WITHIN = re.compile(r"[.!?] +[A-Z]")
_VERSE_ENDS = (",", ".", ";", ":", "!", "?", "—", "–", "-", "’", "”", '"')
_QUOTES = ('"', "“", "„", "«", "「", "—", "–")


def code_blocks(text: str, blocks: list[Block]) -> list[Block]:
    """All blocks of code, however deep; an indented block counts only if it reads like code."""
    return [
        block
        for block in _all(blocks)
        if block.type == "code" and (block.marker or _like_code(text[block.start : block.end]))
    ]


def bare_code_in(text: str) -> bool:
    """Whether there is code outside code blocks: markup, or lines that read like it."""
    tags = len(_TAG.findall(text)) - len(_TAGS_OF_PROSE.findall(text))
    if tags >= 3:
        return True
    num_code = len(_CODE_LINE.findall(text))
    return num_code >= 3 and num_code >= 0.25 * _num_lines(text)


def nothing_but_code(text: str) -> bool:
    """Whether the text is code without a fence around it, whose comments Markdown may take for headings."""
    return "```" not in text and len(_CODE_LINE.findall(text)) >= 0.4 * _num_lines(_COMMENT.sub("", text))


def _num_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def _like_code(text: str) -> bool:
    return len(_CODE_LINE.findall(text)) >= 0.3 * _num_lines(text)


def maths_in(text: str) -> bool:
    """Whether there are formulas, or numbers are worked out, in signs or in words."""
    text = _ADDRESS.sub("", text)
    if _LATEX.search(text) or len(_INLINE_MATHS.findall(text)) >= 2:
        return True
    num_equations = len(_EQUATION.findall(text))
    if num_equations >= 2:
        return True
    return len(_CALCULATION.findall(text)) + 2 * num_equations >= 3


def dependent(text: str) -> bool:
    """Whether points build on the points before them."""
    return len(_DEPENDENT.findall(text)) >= 2


def dialogue_in(text: str, paragraphs: list[Block]) -> bool:
    """Whether people speak in turn: lines with few, repeated names, or paragraphs that open with a quotation mark."""
    speakers = Counter(name.strip() for name in _SPEAKER.findall(text))
    turns = sum(count for count in speakers.values() if count >= 2)
    if turns >= 4 and turns >= 0.5 * sum(speakers.values()):
        return True
    if len(_SAID.findall(text)) >= 2:
        return True
    spoken = sum(text[block.start : block.start + 1] in _QUOTES for block in paragraphs)
    return spoken >= 3 and spoken >= 0.25 * len(paragraphs)


def verse_in(text: str, paragraphs: list[Block]) -> bool:
    """Whether most of the text is short lines that no sentence ends within."""
    num_lines = num_verses = 0
    for block in paragraphs:
        lines = [line.strip() for line in text[block.start : block.end].splitlines()]
        num_lines += len(lines)
        if len(lines) >= 3 and _are_verses(lines):
            num_verses += len(lines)
    return num_verses >= 4 and num_verses >= 0.6 * num_lines


def _are_verses(lines: list[str]) -> bool:
    num_short = sum(len(line) <= 70 for line in lines)
    num_broken = sum(bool(_SENTENCE_WITHIN.search(line)) for line in lines)
    num_upper = sum(line[:1].isupper() for line in lines)
    num_closed = sum(line[-1:] in _VERSE_ENDS for line in lines)
    return (
        num_short >= 0.9 * len(lines)
        and num_broken <= 0.2 * len(lines)
        and max(num_upper, num_closed) >= 0.5 * len(lines)
    )


def _all(blocks: list[Block]) -> list[Block]:
    found, pending = [], list(blocks)
    while pending:
        block = pending.pop()
        found.append(block)
        pending += block.children
    return found
