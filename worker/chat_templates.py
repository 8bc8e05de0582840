"""Chat templates for models whose tokenizer brings none, or the wrong one: the alias option `chat_template`."""

from pathlib import Path
from typing import Any

from jobs.errors import Unavailable

VICUNA_V1_1 = """\
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, \
detailed, and polite answers to the user's questions." -%}{%- set turns = messages -%}
{%- endif -%}
{{- system + ' ' -}}
{%- for message in turns -%}
{%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{- raise_exception('after an optional system message, roles must alternate between user and assistant') -}}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- 'USER: ' + message['content'] + ' ' -}}
{%- else -%}
{{- 'ASSISTANT: ' + message['content'] + '</s>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
"""Vicuna v1.1 to v1.5, and THUDM/apar-7b and apar-13b. The answer's own first token brings the space behind the colon.

Source: the conversation template `vicuna_v1.1` of FastChat.
"""

BUILT_IN = {"vicuna_v1.1": VICUNA_V1_1}


def use_template(tokenizer: Any, said: str) -> None:
    """Give a tokenizer the template that an alias names: a built-in name, a file of Jinja, or Jinja itself.

    Raises:
        Unavailable: it is none of these; one line.
    """
    from jinja2 import TemplateSyntaxError

    tokenizer.chat_template = _find(said)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        where = "chat_template" if _is_jinja(said) else f"chat_template {said}"
        raise Unavailable(f"{where} is not Jinja: line {error.lineno}: {error.message}") from None
    except Exception:  # noqa: S110  a template may refuse this conversation and take others
        pass


def _find(said: str) -> str:
    if said in BUILT_IN:
        return BUILT_IN[said]
    if _is_jinja(said):
        return said
    try:
        template = Path(said).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise Unavailable(
            f"chat_template {said!r} is no known name ({', '.join(BUILT_IN)}), no Jinja, and no file: {reason}"
        ) from None
    if not _is_jinja(template):
        raise Unavailable(f"chat_template {said} holds no Jinja: every message would be left out")
    return template


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text
