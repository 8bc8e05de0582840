"""Ways to damage bytes: those of a broken disk, of a bad copy, and of somebody who means it."""

from random import Random

NASTY = (
    b"",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\n",
    b"\r\n",
    b'"',
    b"{",
    b"[",
    b"}" * 64,
    b"[" * 5000,
    b"null",
    b"NaN",
    b"1e999",
    b"-0",
    b"9" * 400,
    b"{{",
    b"{%",
    b"%}",
    b"[Fork]",
    b"[Child]",
    b"<|im_end|>",
    b"../",
    b"\\u0000",
    b"\\ud800",
    b"a" * 70_000,
    b"PAR1",
    b"\x15\x04\x15\x80\x80\x80\x80\x08",
)


def mutate(data: bytes, random: Random) -> bytes:
    """One to four damages, one after the other."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice(_WAYS)(data, random)
    return data


def _truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randint(0, len(data))]


def _flip_bits(data: bytes, random: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(min(len(damaged), random.choice((1, 1, 2, 8, 64)))):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def _insert(data: bytes, random: Random) -> bytes:
    place = random.randint(0, len(data))
    return data[:place] + random.choice(NASTY) + data[place:]


def _replace(data: bytes, random: Random) -> bytes:
    start, length = random.randint(0, len(data)), random.choice((1, 2, 4, 8, 32))
    return data[:start] + random.choice(NASTY) + data[start + length :]


def _repeat(data: bytes, random: Random) -> bytes:
    start = random.randint(0, len(data))
    piece = data[start : start + random.choice((1, 8, 64, 512))]
    return data[:start] + piece * random.choice((2, 3, 100)) + data[start:]


def _move(data: bytes, random: Random) -> bytes:
    a, b = sorted(random.randint(0, len(data)) for _ in range(2))
    return data[b:] + data[a:b] + data[:a]


def _end_of(data: bytes, random: Random) -> bytes:
    """Parquet keeps its metadata there."""
    damaged = bytearray(data)
    for _ in range(min(len(damaged), random.choice((1, 2, 4)))):
        damaged[-random.randint(1, min(len(damaged), 400))] = random.randrange(256)
    return bytes(damaged)


_WAYS = (_truncate, _flip_bits, _insert, _replace, _repeat, _move, _end_of)
"""Each takes bytes of any length and a generator."""
