"""Who is measured in the tokenizer bench: fuselm, tiktoken and Hugging Face tokenizers, all with one vocabulary.

Knows how each library is built from a vocabulary and called; times nothing. Each is called as its authors mean it to
be, with its defaults and, for tiktoken, its own faster writing of GPT-2's pattern. Special tokens are ordinary text to
all of them.

    coder = make("tiktoken", Tokenizer.load("gpt2"))
    ids = coder.encode("Once upon a time")
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from fuselm.text.huggingface import printed
from fuselm.text.tokenizer import Tokenizer

NAMES = ("fuselm", "tiktoken", "tokenizers")

# Documents of a batch: a web page's text is of this size.
DOCUMENT_CHARACTERS = 10_000


@dataclass(frozen=True)
class Coder:
    """One library with a vocabulary. The fields are its own functions where they fit: a wrapper would show in `small`.

    `encode_array` and `encode_batch` take the number of threads too. `encode_array` is None where there is none.
    """

    encode: Callable[[str], list[int]]
    encode_array: Callable[[Any, int], np.ndarray] | None
    encode_batch: Callable[[list[str], int], Sequence[Sequence[int]]]
    decode: Callable[[list[int]], str]


def missing(names: Sequence[str] = NAMES) -> list[str]:
    """Which of the libraries are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def versions() -> dict[str, str]:
    """Versions of the libraries that are compared, where they are installed, and of numpy."""
    here = [name for name in ("numpy", *NAMES[1:]) if not missing([name])]
    return {name: importlib.metadata.version(name) for name in here}


def make(name: str, tokenizer: Tokenizer) -> Coder:
    """A library with the vocabulary of a tokenizer, new: it remembers no word of any text."""
    return _MAKERS[name](tokenizer)


def warm_up(coder: Coder, text: str) -> None:
    """Make what a library makes on its first call: tables, compiled patterns."""
    coder.decode(coder.encode(text[:2000]))
    if coder.encode_array:
        coder.encode_array(text[:2000], 1)


def documents(text: str) -> list[str]:
    """A text cut into documents of about DOCUMENT_CHARACTERS, at the end of a line where there is one near."""
    return list(_documents(text))


def _documents(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        wanted = start + DOCUMENT_CHARACTERS
        stop = text.find("\n", wanted, 2 * DOCUMENT_CHARACTERS + start) + 1 or wanted
        yield text[start:stop]
        start = stop


def flat(ids: Any) -> np.ndarray:
    """Ids in whatever shape they came, as one array."""
    if isinstance(ids, np.ndarray):
        return ids
    if ids and not isinstance(ids[0], int):
        return np.fromiter(chain.from_iterable(ids), np.uint32, sum(map(len, ids)))
    return np.fromiter(ids, np.uint32, len(ids))


# --- one function for each library -----------------------------------------------------------------------------------


def _fuselm(tokenizer: Tokenizer) -> Coder:
    new = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
    return Coder(
        encode=new.encode_ordinary,
        encode_array=lambda text, threads: new.encode_array(text, disallowed_special=(), threads=threads),
        encode_batch=lambda texts, threads: new.encode_batch(texts, disallowed_special=(), threads=threads),
        decode=new.decode,
    )


def _tiktoken(tokenizer: Tokenizer) -> Coder:
    pattern = importlib.import_module("tiktoken_ext.openai_public").r50k_pat_str
    encoding = importlib.import_module("tiktoken").Encoding(
        "bench", pat_str=pattern, mergeable_ranks=_ordinary(tokenizer), special_tokens=tokenizer.special_tokens
    )
    return Coder(
        encode=encoding.encode_ordinary,
        encode_array=lambda text, threads: encoding.encode_to_numpy(text, disallowed_special=()),
        encode_batch=lambda texts, threads: encoding.encode_ordinary_batch(texts, num_threads=threads),
        decode=encoding.decode,
    )


def _tokenizers(tokenizer: Tokenizer) -> Coder:
    library = importlib.import_module("tokenizers")
    vocab = {printed(text): token for text, token in _ordinary(tokenizer).items()}
    merges = [(printed(left), printed(right)) for left, right in tokenizer.merges]
    built = library.Tokenizer(library.models.BPE(vocab=vocab, merges=merges))
    built.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = library.decoders.ByteLevel()
    encode_many = getattr(built, "encode_batch_fast", built.encode_batch)  # the fast one leaves offsets out
    return Coder(
        encode=lambda text: built.encode(text).ids,
        encode_array=None,
        encode_batch=lambda texts, threads: [encoding.ids for encoding in encode_many(texts)],
        decode=built.decode,
    )


_MAKERS: dict[str, Callable[[Tokenizer], Coder]] = {
    "fuselm": _fuselm,
    "tiktoken": _tiktoken,
    "tokenizers": _tokenizers,
}


def _ordinary(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Bytes to ids without the special tokens; the lowest id counts where two have the same bytes."""
    specials = set(tokenizer.special_tokens.values())
    kept = [(text, token) for token, text in tokenizer.vocab.items() if token not in specials]
    return dict(reversed(kept))
