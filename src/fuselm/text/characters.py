"""An encoder with one token for each character, for small corpora and small models. The same methods as native.py's.

Text is UTF-8; what is not in the alphabet is refused, or becomes the character that stands for the unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fuselm.text.reference import PlainEncoder


class CharacterEncoder(PlainEncoder):
    """A vocabulary of characters that encodes."""

    def __init__(
        self, alphabet: Mapping[str, int], specials: Sequence[bytes], special_ids: Sequence[int], unknown: str | None
    ) -> None:
        super().__init__(specials, special_ids)
        if unknown is not None and unknown not in alphabet:
            raise ValueError(f"What stands for unknown characters is one of the vocabulary; {unknown!r} is not.")
        self._table = np.full(0x110000, -1 if unknown is None else alphabet[unknown], np.int64)
        for character, token in alphabet.items():
            if len(character) != 1:
                raise ValueError(f"A character vocabulary has single characters; got {character!r}.")
            self._table[ord(character)] = token

    def find_cut(self, data: bytes, start: int, searched: int, end: int) -> int:
        """The last place in data[searched:end] where a character begins and no special stands across it, or 0."""
        longest = max(map(len, self.specials), default=0)
        for place in range(end - max(4, longest), searched, -1):
            if data[place] & 0xC0 != 0x80 and not self.spans(data, place):
                return place
        return 0

    def encode_piece(self, piece: bytes) -> np.ndarray:
        """The ids of a text without specials."""
        codes = np.frombuffer(piece.decode("utf-8", "replace").encode("utf-32-le"), np.uint32)
        ids = self._table[codes]
        if len(missing := np.flatnonzero(ids < 0)):
            place = int(missing[0])
            around = "".join(map(chr, codes[max(0, place - 20) : place + 20]))
            raise ValueError(
                f"A character vocabulary knows the characters it was made of; {chr(codes[place])!r}, in {around!r}, is "
                "not one of them. Make the vocabulary of text that has it, or with a character for unknown ones."
            )
        return ids.astype(np.uint32)
