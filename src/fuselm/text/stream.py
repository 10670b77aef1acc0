"""Text that comes token by token: characters as soon as they are whole, and nothing of a stop string.

The pieces add up to `tokenizer.decode` of all ids, or to what stands in it before the first stop string; how the ids
are grouped does not matter. A piece of text is held back only while it can still become a stop string. Each character
is looked at once, however many stop strings there are and however long. One object for one stream; knows no models.

    stream = StreamDecoder(tokenizer, stop=["<|end|>", "User:"])
    for token in generated:
        print(stream.push(token), end="")
        if stream.stopped is not None:
            break
    print(stream.finish())
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from fuselm.text.tokenizer import Tokenizer

# The beginning of a character of UTF-8 that the next bytes may complete. Python's incremental decoder would also hold
# back beginnings that no byte can complete (b"\xed\xa0", half of a surrogate pair).
_UNFINISHED = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3](?:[\x80-\xbf]{1,2})?|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)


class StreamDecoder:
    """Decodes one stream. `stopped` is the stop string that ended it, None while there was none."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stops = _Stops(_checked(stop))
        self._bytes = b""  # of a character that is not whole
        self._held = ""  # the beginning of a stop string, perhaps
        self._finished = False

    def push(self, ids: int | Iterable[int]) -> str:
        """Take the next id, or several, and return the text that is certain now and has not been returned before."""
        if self.stopped is not None:
            return ""
        if self._finished:
            raise ValueError("A stream takes no ids behind its end; this one is finished. Make a new StreamDecoder.")
        tokens = (ids,) if isinstance(ids, int | np.integer) else ids
        data = self._bytes + b"".join(self._tokenizer.token_bytes(int(token)) for token in tokens)
        unfinished = _UNFINISHED.search(data, max(0, len(data) - 3))
        whole = unfinished.start() if unfinished else len(data)
        self._bytes = data[whole:]
        return self._advance(data[:whole].decode("utf-8", "replace"))

    def finish(self) -> str:
        """The rest of the text: no more ids will come."""
        # A character that stays unfinished becomes U+FFFD, which may be what a stop string waits for.
        text = self._advance(self._bytes.decode("utf-8", "replace")) + self._held
        self._bytes, self._held, self._finished = b"", "", True
        return text

    def _advance(self, new: str) -> str:
        """Append characters and return what comes free."""
        text = self._held + new
        end = self._stops.advance(text, len(self._held))
        if end is None:
            free = len(text) - self._stops.held
            self._held = text[free:]
            return text[:free]
        self.stopped, self._held, self._bytes = self._stops.found, "", b""
        return text[: end - len(self._stops.found)]


class _Stops:
    """Where a text first completes a stop string: the automaton of Aho and Corasick.

    A state is a beginning of a stop string, the longest one that the text seen so far ends with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._length = [0]  # of the beginning
        self._complete = [""]  # the longest stop string that the beginning ends with
        for stop in stops:
            self._add(stop)
        self._shorter = self._link()  # the longest state that is an end of this one
        # Almost all characters begin no stop string: a search finds the next that does.
        self._first = re.compile(f"[{''.join(map(re.escape, self._next[0]))}]") if stops else None

    @property
    def held(self) -> int:
        """How many characters at the end of the text are the beginning of a stop string."""
        return self._length[self._state]

    def advance(self, text: str, start: int) -> int | None:
        """Read text[start:]; the place behind the first stop string, which `found` then is, or None."""
        if self._first is None:
            return None
        place = start
        while place < len(text):
            if not self._state:
                if not (match := self._first.search(text, place)):
                    return None
                place = match.start()
            self._step(text[place])
            place += 1
            if self._complete[self._state]:
                self.found = self._complete[self._state]
                return place
        return None

    def _step(self, character: str) -> None:
        state = self._state
        while state and character not in self._next[state]:
            state = self._shorter[state]
        self._state = self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for length, character in enumerate(stop, 1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._length.append(length)
                self._complete.append("")
            state = self._next[state][character]
        self._complete[state] = stop

    def _link(self) -> list[int]:
        """For each state, shortest first, the one to go on from when no character fits."""
        shorter = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:  # grows as it is read
            for character, following in self._next[state].items():
                queue.append(following)
                other = shorter[state]
                while other and character not in self._next[other]:
                    other = shorter[other]
                shorter[following] = self._next[other].get(character, 0)
                # A whole stop string starts before any that it ends with.
                self._complete[following] = self._complete[following] or self._complete[shorter[following]]
        return shorter


def _checked(stop: Sequence[str]) -> list[str]:
    if isinstance(stop, str):
        raise TypeError(f"Stop strings come in a list; got the string {stop!r}. Put it into a list.")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"A stop string is a str of at least one character; got {text!r}. Leave it out.")
    return list(stop)
