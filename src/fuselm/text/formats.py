"""Tokenizers in files: Hugging Face's tokenizer.json, GPT-2's pair of files, tiktoken's file of ranks.

A file is read only when the tokenizer made of it gives the ids that the library it was written for gives, and nothing
is written that would read back as something else; the rest is refused in words. What each format carries:

    tokenizer.json                 everything; also character vocabularies
    vocab.json and merges.txt      ids and merges; special tokens are recognised (see read_gpt2)
    *.tiktoken                     ids and merges; special tokens are given when it is read (see read_tiktoken)

The JSON document inside a tokenizer.json is huggingface.py's; encoding is tokenizer.py's.

    save(tokenizer, Path("run"))                                            # run/tokenizer.json
    load(Path("run")); load(Path("gpt2-files")); load(Path("r50k_base.tiktoken"))
    write_gpt2(tokenizer, Path("for-others"))
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, pairwise, zip_longest
from pathlib import Path
from typing import Any

from fuselm.files import write_whole
from fuselm.text import huggingface
from fuselm.text.bpe import check_special_tokens
from fuselm.text.huggingface import ALPHABET, Pairs, bpe_texts, check, printed, shown, unprinted
from fuselm.text.tokenizer import END_OF_TEXT, Tokenizer

NAME = "tokenizer.json"
GPT2_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
MAX_FILE_BYTES = 1 << 28  # several times what the largest published vocabularies take


def save(tokenizer: Tokenizer, path: str | Path) -> Path:
    """Write a tokenizer.json: to a file of that ending, or into a folder under that name. Returns the file's path."""
    path = json_path(path)
    document = huggingface.to_document(check(tokenizer))
    write_whole(path, json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    return path


def json_path(path: str | Path) -> Path:
    """The file that `save` writes for a path."""
    path = Path(path)
    if path.is_dir() or not path.suffix:
        return path / NAME
    if path.suffix != ".json":
        raise ValueError(f"A tokenizer is saved to a file ending in .json or into a folder; got {path}. Rename it.")
    return path


def load(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json, a folder with one or with GPT-2's pair, or a .tiktoken file."""
    path = Path(path)
    known = " or ".join([NAME, *(f"{vocab} with {merges}" for vocab, merges in GPT2_NAMES)])
    if path.is_dir():
        if (path / NAME).is_file():
            return _read_json(path / NAME)
        for vocab, merges in GPT2_NAMES:
            if (path / vocab).is_file() and (path / merges).is_file():
                return read_gpt2(path / vocab, path / merges)
        raise FileNotFoundError(f"A tokenizer's folder has {known}; {path} has none of them.")
    if not path.is_file():
        raise FileNotFoundError(f"A tokenizer is read from a file or folder; there is none at {path}.")
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".tiktoken":
        return read_tiktoken(path)
    raise ValueError(
        f"{path}: a tokenizer is a .json file in Hugging Face's format, a .tiktoken file, or a folder with {known}. "
        "Give one of these."
    )


def _read_json(path: Path) -> Tokenizer:
    with _about(path):
        return huggingface.from_document(_parse(path))


# --- GPT-2's two files -----------------------------------------------------------------------------------------------


def read_gpt2(vocab: str | Path, merges: str | Path, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Read vocab.json and merges.txt (or encoder.json and vocab.bpe).

    Special tokens are not marked in these files. They are <|endoftext|> and whatever is neither a byte nor made by a
    merge; only a text like "Ġthe", which has hidden bytes in it, is rather a sign that merges are missing, and refused.
    `special_tokens` names others; those that the vocabulary does not have get ids behind its last.
    """
    vocab, merges = Path(vocab), Path(merges)
    with _about(vocab):
        texts = huggingface.vocabulary(_parse(vocab))
    with _about(merges):
        pairs = _merge_lines(_text(merges))
    names = [data.decode() for data in check_special_tokens(special_tokens)]
    orphans = _orphans(texts, pairs)
    if cut := [text for text in orphans if _hides_bytes(text) and text not in names]:
        raise ValueError(
            f"{vocab}: a token is a byte, made by a merge, or special; {cut[0]!r} is made by no merge of {merges}. If "
            "that file is cut short or another tokenizer's, get the right one; if the token is special, name it in "
            "special_tokens."
        )
    specials = {text: texts[text] for text in [*orphans, END_OF_TEXT] if text in texts}
    known = {unprinted(text): token for text, token in texts.items() if ALPHABET.issuperset(text)}
    more = _number([name for name in names if name not in specials], known, count(max(texts.values()) + 1))
    with _about(vocab):
        return huggingface.make_bpe(texts, pairs, specials | more)


def write_gpt2(tokenizer: Tokenizer, folder: str | Path) -> Path:
    """Write vocab.json and merges.txt into a folder, which is made where there is none. Returns the folder."""
    _refuse_characters(tokenizer, "GPT-2's files hold")
    texts, folder = bpe_texts(check(tokenizer)), Path(folder)
    pairs = [(printed(left), printed(right)) for left, right in tokenizer.merges]
    orphans = set(_orphans(texts, pairs))
    recognised = orphans | (texts.keys() & {END_OF_TEXT})
    if lost := recognised ^ tokenizer.special_tokens.keys() | set(filter(_hides_bytes, orphans)):
        raise ValueError(
            "GPT-2's files do not mark special tokens: they are recognised because no merge makes them. These files "
            f"would not tell whether {min(lost)!r} is one. Save a tokenizer.json."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "vocab.json", json.dumps(texts, ensure_ascii=False))
    write_whole(folder / "merges.txt", "\n".join(["#version: 0.2", *(f"{left} {right}" for left, right in pairs), ""]))
    return folder


def _merge_lines(text: str) -> Pairs:
    lines = text.replace("\r\n", "\n").split("\n")
    # Only the first line can be a comment: "# #" is one of GPT-2's merges.
    first = 1 if lines[0].startswith("#version") else 0
    last = len(lines) - (not lines[-1])
    pairs: Pairs = []
    for number, line in enumerate(lines[first:last], first + 1):
        try:
            pairs.append(huggingface.pair(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return pairs


def _orphans(texts: Mapping[str, int], pairs: Pairs) -> list[str]:
    """What is neither a byte nor made by a merge."""
    made = {left + right for left, right in pairs}
    return [text for text in texts if text not in made and text not in ALPHABET]


def _hides_bytes(text: str) -> bool:
    """Whether a text can only be one in GPT-2's alphabet: it has a character that stands for an invisible byte."""
    return ALPHABET.issuperset(text) and max(text, default="") >= "\u0100"


# --- tiktoken's ranks ------------------------------------------------------------------------------------------------


def read_tiktoken(path: str | Path, special_tokens: Mapping[str, int] | Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Read a file of ranks, which are the ids.

    Special tokens are not in it. Those given without ids get ids that no rank has, from the lowest: where the
    original left a gap for them, else behind the last rank.
    """
    path = Path(path)
    with _about(path):
        ranks = _rank_lines(_text(path))
        merges = _merges_of(ranks)
        if not isinstance(special_tokens, Mapping):
            taken = set(ranks.values())
            names = [data.decode() for data in check_special_tokens(special_tokens)]
            special_tokens = _number(names, ranks, (token for token in count() if token not in taken))
        return check(Tokenizer({rank: token for token, rank in ranks.items()}, merges, special_tokens))


def write_tiktoken(tokenizer: Tokenizer, path: str | Path) -> Path:
    """Write a file of ranks; special tokens are left out. Returns its path."""
    path = Path(path)
    if path.suffix != ".tiktoken":
        raise ValueError(f"A file of ranks is known by its ending, .tiktoken; got {path}. Rename it.")
    _refuse_characters(tokenizer, "A file of ranks holds")
    ranks = check(tokenizer)._ordinary()
    for ours, theirs in zip_longest(tokenizer.merges, _merges_of(ranks)):
        if ours != theirs:
            merge, other = (" + ".join(map(repr, pair)) if pair else "nothing" for pair in (ours, theirs))
            raise ValueError(
                "A file of ranks has no merges: they follow from the ids, which have to be in the order of the merges. "
                f"Here {merge} would read back as {other}. Save a tokenizer.json."
            )
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in sorted((i, t) for t, i in ranks.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(lines))
    return path


def _rank_lines(text: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    taken: dict[int, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line:
            continue
        code, _, rank = line.partition(" ")
        try:
            token = base64.b64decode(code, validate=True)
        except ValueError:
            token = b""
        if not token or not re.fullmatch("[0-9]{1,9}", rank):
            raise ValueError(f"line {number}: a line is a token in base64, a space and its rank; got {shown(line)}.")
        if token in ranks or taken.setdefault(int(rank), token) != token:
            raise ValueError(f"line {number}: tokens and ranks are all different; {token!r} or {rank} has come before.")
        ranks[token] = int(rank)
    return ranks


def _merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges that ranks stand for, in the order of ranks.

    tiktoken joins any neighbours that make a token, the lowest rank first. Yet each token is made of one pair only:
    wherever in a word it comes to be, no step before crossed its borders, so the steps inside them were those that are
    taken when its bytes stand alone. We take these and see which two parts are left before the last.
    """
    for token in ranks:
        # No word of GPT-2's has a space behind another character. Ways to split that have (cl100k's) give other ids.
        if re.search(rb"[!-~][ \t\r\n]", token):
            raise ValueError(
                f"Words are split as GPT-2 splits them, and {token!r} is in none of them: these ranks are for another "
                "way to split. Use ranks of GPT-2's kind, such as r50k_base."
            )
    return [_last_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    found = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
    while len(parts) > 2:
        place = found.index(min(found))
        if found[place] == math.inf:
            # tiktoken would still find it where it is a whole word, without merging; merges cannot say that.
            raise ValueError(
                f"A token is a byte or made of two others; {token!r} of rank {ranks[token]} is not, as merging ends at "
                f"{' + '.join(map(repr, parts))}. If it is special, take it out and name it as a special token."
            )
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        del found[place]
        if place:
            found[place - 1] = ranks.get(parts[place - 1] + parts[place], math.inf)
        if place < len(found):
            found[place] = ranks.get(parts[place] + parts[place + 1], math.inf)
    return parts[0], parts[1]


# --- what they share -------------------------------------------------------------------------------------------------


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Begin what is said about a file with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse_characters(tokenizer: Tokenizer, what: str) -> None:
    if tokenizer.kind == "characters":
        raise ValueError(f"{what} a byte-level BPE; this tokenizer is one of characters. Save a tokenizer.json.")


def _number(names: Sequence[str], known: Mapping[bytes, int], free: Iterator[int]) -> dict[str, int]:
    """An id for each name: the one its bytes have already, else the next free one."""
    return {name: known[data] if (data := name.encode()) in known else next(free) for name in names}


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"A tokenizer's file has at most {MAX_FILE_BYTES} bytes; this has {size}. Is it another file?")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"A tokenizer's file is UTF-8 text; byte {error.start} is not. Is it another file?") from None


def _parse(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        document = json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"A tokenizer's file is JSON; this cannot be read: {error}. Is the file whole?") from None
    if not isinstance(document, dict):
        raise ValueError(f"A tokenizer's file is a JSON object; got {shown(document)}.")
    return document


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of two entries with one name Python would take the last, others the first."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = sorted(name for name, _ in pairs)
        raise ValueError(f"{next(a for a, b in pairwise(names) if a == b)!r} comes twice in one object")
    return entries
