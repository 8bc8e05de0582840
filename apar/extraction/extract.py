"""One answer in, one outcome out, by either set of rules."""

from apar.errors import InputError
from apar.extraction.options import RULES, Extraction, Options, Rules
from apar.extraction.structure import verify

_DEFAULTS = Options()


def extract(text: str, rules: Rules = "markdown", options: Options | None = None) -> Extraction:
    """Turn a finished answer into a paragraph tree, a negative, or a reason to drop it.

    Raises:
        InputError: if there are no such rules.
    """
    if rules not in RULES:
        raise InputError(f"rules {rules!r} do not exist: use {' or '.join(RULES)}")
    options = options or _DEFAULTS
    if not text.strip():
        return Extraction(None, "empty", None)
    if len(text) > options.max_chars:
        return Extraction(None, "too_long", None)
    if rules == "paper":
        from apar.extraction.paper import extract_paper

        outcome = extract_paper(text, options)
    else:
        from apar.extraction.markdown import extract_markdown

        outcome = extract_markdown(text, options)
    if outcome.nodes is not None:
        verify(text, outcome.nodes)
    return outcome
