"""URLs of objects: what one may look like, and whether a root allows it.

A URL is taken as it is written: nothing is decoded or tidied up, so that what is checked is what is opened. Whatever
another program might read differently (`..`, `%2e`, an empty segment, a query) is refused instead.
"""

import re
from dataclasses import dataclass

from jobs.errors import BadInput

SCHEMES = ("s3", "gs", "file")
MAX_URL_BYTES = 1500
"""A bucket's name and the longest key that S3 and GCS have, 1024 bytes, with room."""

_SPLIT = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")


@dataclass(frozen=True)
class Url:
    """Of an object or, in a root, of a folder of them."""

    scheme: str
    bucket: str
    """Empty for `file`."""
    key: str
    """Without a slash in front."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def beside(self, name: str) -> "Url":
        """Another object in the same folder."""
        return Url(self.scheme, self.bucket, self.key[: len(self.key) - len(self.name)] + name)


def is_url(text: str) -> bool:
    return "://" in text


def parse_url(text: str) -> Url:
    """Read the URL of an object.

    Raises:
        BadInput: another scheme, or a part that could mean two things.
    """
    url = _parse(text)
    if url.name == "":
        raise BadInput(f"{_shown(text)} names a folder: name a file in it")
    return url


def parse_root(text: str) -> Url:
    """Read the URL of a root, a whole bucket or a folder; a slash at its end is added.

    Raises:
        BadInput: as `parse_url`; or `file:///`, which would be everything on the machine.
    """
    root = _parse(text if text.endswith("/") else f"{text}/")
    if root.scheme == "file" and root.key == "":
        raise BadInput("file:/// is the whole machine: name a folder")
    return root


def _parse(text: str) -> Url:
    shown = _shown(text)
    if len(text.encode(errors="replace")) > MAX_URL_BYTES:
        raise BadInput(f"the URL {shown} has over {MAX_URL_BYTES} bytes: use a shorter name")
    match = _SPLIT.fullmatch(text)
    if match is None or match[1] not in SCHEMES:
        raise BadInput(f"{shown} is no URL that forq opens: use {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    scheme, (authority, _, key) = match[1], match[2].partition("/")
    if "@" in authority:
        # Not repeated: what stands before the @ may be a password.
        raise BadInput(f"a {scheme}:// URL has a user or password in it: leave it out, see docs/object-storage.md")
    if not text.isprintable():
        raise BadInput(f"{shown} has control or unprintable characters: use a name without them")
    if "?" in text or "#" in text:
        raise BadInput(f"{scheme}://{authority}/...: a query (?) or fragment (#) is not read: leave it out")
    if "\\" in text:
        raise BadInput(f"{shown} has a backslash: write folders with /")
    if _PERCENT.search(text):
        raise BadInput(f"{shown} is percent-encoded, which is not decoded: write the name as it is")
    if scheme == "file" and authority:
        raise BadInput(f"{shown} names the host {authority!r}: files of this machine are file:///FOLDER/FILE")
    if scheme != "file" and not _BUCKET.fullmatch(authority):
        raise BadInput(f"{shown}: {authority!r} is no bucket's name: 3 or more of a-z, 0-9, '.', '_', '-'")
    *folders, last = key.split("/")
    if any(part in ("", ".", "..") for part in folders) or last in (".", ".."):
        raise BadInput(f"{shown} has an empty, '.' or '..' part: write the path straight")
    return Url(scheme, authority, key)


def is_under(url: Url, root: Url) -> bool:
    """Whether an object is in a root's folder, by name; symbolic links are `local.py`'s matter."""
    return (url.scheme, url.bucket) == (root.scheme, root.bucket) and url.key.startswith(root.key)


def _shown(text: str) -> str:
    """For a message: no control characters, no password, no query, which may be a signature; not too long."""
    text = re.sub(r"(?<=://)[^/]*@", "...@", text)
    text = re.sub(r"[?#].*", "?...", text, flags=re.DOTALL)
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= 160 else f"{text[:100]}...{text[-50:]}"
