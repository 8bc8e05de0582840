"""Submit speaks of the command line's flags; who fills in a form or writes a file has keys instead."""

import re
from collections.abc import Iterable


def keys_for_flags(message: str, keys: Iterable[str]) -> str:
    """The message with `--prompt-column` as `prompt_column`, for these keys; commands between backquotes stay."""
    flags = {"--" + key.replace("_", "-"): key for key in keys}
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    pattern = re.compile(rf"`[^`]*`|(?<![\w-])({names})(?![\w-])")
    return pattern.sub(lambda match: flags[match[1]] if match[1] else match[0], message)
