"""Makes the ranges in src/fuselm/text/unicode.py by asking tiktoken and tokenizers about every code point.

PYTHONPATH=src python tests/text/unicode_classes.py      # prints the three tables, to be pasted when they move on
"""

from __future__ import annotations

import textwrap

import tiktoken
import tokenizers

PROPERTIES = {"LETTERS": r"\p{L}", "NUMBERS": r"\p{N}", "SPACES": r"\s"}
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
EVERYTHING = "".join(map(chr, CODE_POINTS))


def of_tiktoken(pattern: str) -> set[str]:
    """The characters a pattern takes: tiktoken drops what no match covers."""
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=bytes_alone, special_tokens={})
    return set(encoding.decode_bytes(encoding.encode_ordinary(EVERYTHING)).decode())


def of_tokenizers(pattern: str) -> set[str]:
    """The characters a pattern takes: everything but what is left after removing its matches."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
    return set(EVERYTHING) - {c for piece, _ in split.pre_tokenize_str(EVERYTHING) for c in piece}


def ranges(characters: set[str]) -> str:
    """Sorted ranges as hexadecimal text: 41-5A 61-7A AA."""
    found: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return " ".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in found)


if __name__ == "__main__":
    for name, pattern in PROPERTIES.items():
        taken = of_tiktoken(pattern)
        assert taken == of_tokenizers(pattern), f"tiktoken and tokenizers disagree about {pattern}"
        body = "\n".join(textwrap.wrap(ranges(taken), 118, break_on_hyphens=False))
        print(f'{name} = """\n{body}\n"""\n')
