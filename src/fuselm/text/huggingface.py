"""A tokenizer as the JSON document that Hugging Face tokenizers reads and writes, and back.

A document becomes a tokenizer only when that gives the ids the library gives for the document; what would make them
differ (another way to split words, a normalizer, tokens added around a text) is refused by name. Byte-level BPE is
written in GPT-2's printable alphabet, characters as a WordLevel model. Knows no files: those are formats.py's.

    text = json.dumps(to_document(tokenizer), ensure_ascii=False)
    from_document(json.loads(text)) == tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fuselm.text.blocks import utf8
from fuselm.text.tokenizer import MAX_IDS, Tokenizer

# GPT-2's alphabet: a visible character for each byte. Visible ones of Latin-1 stand for themselves, the others, in
# their order, are the characters from U+0100 on.
_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_PRINTED = {byte: chr(byte if byte in _VISIBLE else 0x100 + _HIDDEN.index(byte)) for byte in range(256)}
_BYTES = {ord(character): byte for byte, character in _PRINTED.items()}
ALPHABET = frozenset(_PRINTED.values())

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
# Any character, newlines too: Oniguruma, which the library uses, knows no (?s).
_EACH_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}

Pairs = list[tuple[str, str]]


def printed(data: bytes) -> str:
    """Bytes in GPT-2's alphabet."""
    return data.decode("latin-1").translate(_PRINTED)


def unprinted(text: str) -> bytes:
    """The bytes of a text in GPT-2's alphabet."""
    return text.translate(_BYTES).encode("latin-1")


def shown(value: object) -> str:
    """JSON as it may stand in a sentence."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:160]}…"


# --- writing ---------------------------------------------------------------------------------------------------------


def to_document(tokenizer: Tokenizer) -> dict[str, Any]:
    """The document of a tokenizer that `check` lets pass."""
    added = [
        {"id": token, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for name, token in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    ]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    return head | (_bpe_parts(tokenizer) if tokenizer.kind == "bpe" else _character_parts(tokenizer))


def bpe_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """The vocabulary as texts, by id: ordinary tokens in GPT-2's alphabet, special tokens as they are.

    Specials have to be in it though a document lists them too: the library numbers on those it does not find.
    """
    ordinary = ((printed(data), token) for data, token in tokenizer._ordinary().items())
    texts = _one_id_each([*ordinary, *tokenizer.special_tokens.items()])
    return dict(sorted(texts.items(), key=lambda item: item[1]))


def _bpe_parts(tokenizer: Tokenizer) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": bpe_texts(tokenizer),
        # As strings, not as pairs: libraries of before 2024 read no others, and no printed token has a space in it.
        "merges": [f"{printed(left)} {printed(right)}" for left, right in tokenizer.merges],
    }
    return {"pre_tokenizer": _BYTE_LEVEL, "post_processor": None, "decoder": _BYTE_LEVEL, "model": model}


def _character_parts(tokenizer: Tokenizer) -> dict[str, Any]:
    texts = _one_id_each((data.decode(), token) for token, data in tokenizer.vocab.items())
    # The library wants a name for unknown characters; one that is not in the vocabulary makes it refuse them, as we do.
    model = {"type": "WordLevel", "vocab": texts, "unk_token": tokenizer.unknown or ""}
    return {"pre_tokenizer": _EACH_CHARACTER, "post_processor": None, "decoder": {"type": "Fuse"}, "model": model}


def _one_id_each(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    texts: dict[str, int] = {}
    for text, token in pairs:
        if texts.setdefault(text, token) != token:
            raise ValueError(
                f"A file names a token by its text; {text!r} would stand for {texts[text]} and for {token}. Give the "
                "special token another text, or the id that its text has already."
            )
    return texts


# --- reading ---------------------------------------------------------------------------------------------------------


def from_document(document: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a document, or why there is none."""
    if not isinstance(model := document.get("model"), dict):
        raise ValueError(
            'A tokenizer.json has an object "model"; this file has none. For GPT-2\'s vocabulary, which has its merges '
            "in a file of their own, give the folder."
        )
    _refuse_steps(document)
    # Files of before 2021 do not name the model's type; only BPE has merges.
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind == "BPE":
        return _read_bpe(document, model)
    if kind == "WordLevel":
        return _read_characters(document, model)
    raise ValueError(
        f"The model of a tokenizer is BPE, or WordLevel over single characters; got {shown(kind)}. "
        "Use a byte-level BPE of GPT-2's kind, or train one."
    )


def _refuse_steps(document: Mapping[str, Any]) -> None:
    """Refuse what the library would do to a text or its ids besides splitting and merging."""
    if document.get("version") != "1.0":
        raise ValueError(f'The version of a tokenizer.json is "1.0"; got {shown(document.get("version"))}.')
    for step, effect in (
        ("normalizer", "changes the text before it is encoded"),
        ("truncation", "cuts ids off"),
        ("padding", "adds ids"),
    ):
        if document.get(step) is not None:
            raise ValueError(
                f"A {step} {effect}, which is left to the caller here; got {shown(document[step])}. "
                f'Set "{step}" to null, and do it where you call encode.'
            )
    after = document.get("post_processor")
    # ByteLevel's only trims offsets. The others (a template, say) put tokens around a text; here nobody does so
    # unasked, and leaving them out silently would give other ids than the library's.
    if after is not None and _type(after) != "ByteLevel":
        raise ValueError(
            f"A post-processor other than ByteLevel adds tokens to every text; got {shown(after)}. "
            'Set "post_processor" to null, and put the tokens in where you call encode.'
        )


def _read_bpe(document: Mapping[str, Any], model: Mapping[str, Any]) -> Tokenizer:
    before = document.get("pre_tokenizer")
    options = before if isinstance(before, dict) and _type(before) == "ByteLevel" else {}
    if options.get("add_prefix_space") is not False or options.get("use_regex", True) is not True:
        raise ValueError(
            "A BPE tokenizer splits words as GPT-2 does (ByteLevel with add_prefix_space false and use_regex true); "
            f"the pre-tokenizer is {shown(before)}, so its ids would be others. Use a tokenizer of GPT-2's kind."
        )
    # What is not listed has no effect where each of the 256 bytes is a token: unk_token, fuse_unk, byte_fallback.
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(option):
            raise ValueError(
                f"A byte-level BPE merges by rank alone; {option} is {shown(model[option])}, which gives other ids. "
                "Use a tokenizer without it."
            )
    if not isinstance(merges := model.get("merges"), list):
        raise ValueError(f"The merges of a BPE model are a list; got {shown(merges)}.")
    texts, pairs = vocabulary(model.get("vocab")), [pair(entry) for entry in merges]
    return make_bpe(texts, pairs, _added_tokens(document, texts))


def _read_characters(document: Mapping[str, Any], model: Mapping[str, Any]) -> Tokenizer:
    if document.get("pre_tokenizer") != _EACH_CHARACTER:
        raise ValueError(
            f"A WordLevel model is read when each character is a word (pre-tokenizer {shown(_EACH_CHARACTER)}); got "
            f"{shown(document.get('pre_tokenizer'))}. Whole words as tokens are not supported: train a BPE."
        )
    texts, unknown = vocabulary(model.get("vocab")), model.get("unk_token")
    vocab = _by_id((utf8(text), token) for text, token in texts.items())
    known = isinstance(unknown, str) and unknown in texts  # where not, the library refuses unknown characters
    return check(Tokenizer._of_characters(vocab, _added_tokens(document, texts), unknown if known else None))


def make_bpe(texts: Mapping[str, int], pairs: Pairs, specials: Mapping[str, int]) -> Tokenizer:
    """The tokenizer of a vocabulary and merges in GPT-2's alphabet and of special tokens."""
    made = {left + right for left, right in pairs}

    def data_of(text: str) -> bytes:
        # A special stands for itself unless it is also made by merging. So does an entry that nothing can make and
        # that has other characters: the library decodes it like that.
        raw = text in specials and text not in made and text not in ALPHABET
        return utf8(text) if raw or not ALPHABET.issuperset(text) else unprinted(text)

    vocab = _by_id((data_of(text), token) for text, token in texts.items())
    return check(Tokenizer(vocab, [(unprinted(left), unprinted(right)) for left, right in pairs], specials))


def _by_id(tokens: Iterable[tuple[bytes, int]]) -> dict[int, bytes]:
    vocab: dict[int, bytes] = {}
    for data, token in tokens:
        if vocab.setdefault(token, data) != data:
            raise ValueError(f"An id stands for one token; {token} stands for {vocab[token]!r} and for {data!r}.")
    return vocab


def _added_tokens(document: Mapping[str, Any], texts: Mapping[str, int]) -> dict[str, int]:
    """The special tokens. All others that may be added to a vocabulary are refused."""
    entries = document.get("added_tokens") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f'"added_tokens" is a list of objects; got {shown(entries)}.')
    specials: dict[str, int] = {}
    following = len(texts)
    for entry in entries:
        name, token = _added_token(entry)
        # The library looks a token up and, where it is not in the vocabulary, numbers on; what "id" says is ignored.
        expected = texts.get(name, following)
        if token != expected or name in specials:
            raise ValueError(
                f"The added token {name!r} has the id {expected} by the vocabulary, and comes once; got id {token}. "
                "Put the token into the vocabulary with the id that is meant."
            )
        specials[name] = token
        following = max(following, token + 1)
    # The library takes those with "normalized" false out of a text before it looks for the others.
    if len({bool(entry.get("normalized")) for entry in entries}) > 1:
        raise ValueError(
            '"normalized" is the same in all added tokens, or some would be found before others that stand earlier; '
            "here it is true in some and false in others. Without a normalizer it has no other effect: make it false."
        )
    return specials


def _added_token(entry: Mapping[str, Any]) -> tuple[str, int]:
    name, token = entry.get("content"), entry.get("id")
    if not isinstance(name, str) or not is_unicode(name) or type(token) is not int or not 0 <= token < MAX_IDS:
        raise ValueError(f'An added token has a text "content" and an "id" below {MAX_IDS}; got {shown(entry)}.')
    if entry.get("special") is not True or any(entry.get(key) for key in ("single_word", "lstrip", "rstrip")):
        raise ValueError(
            "An added token is special and found wherever its text stands (special true; single_word, lstrip and "
            f"rstrip false); got {shown(entry)}. Mark it special, or leave it out."
        )
    return name, token


def vocabulary(texts: object) -> dict[str, int]:
    """Texts and their ids, if that is what it is."""
    if not isinstance(texts, dict) or not texts:
        raise ValueError(f"A vocabulary is an object of texts and ids; got {shown(texts)}.")
    for text, token in texts.items():
        if type(token) is not int or not 0 <= token < MAX_IDS:
            raise ValueError(f"A token's id is a whole number from 0 to {MAX_IDS - 1}; {text!r} has {shown(token)}.")
        if not is_unicode(text):
            raise ValueError(f"A token's text is Unicode; {text!r} has half of a surrogate pair.")
    return texts


def pair(entry: object) -> tuple[str, str]:
    """Two tokens that are merged, written "a b" or ["a", "b"]."""
    parts = entry.split(" ") if isinstance(entry, str) else entry
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        raise ValueError(f"A merge is two tokens with a space between them; got {shown(entry)}.")
    if strange := {*parts[0], *parts[1]} - ALPHABET:
        raise ValueError(
            f"Merges are written in GPT-2's printable alphabet, a character for each byte; {shown(entry)} has "
            f"{min(strange)!r}. Use a tokenizer that is byte-level."
        )
    return parts[0], parts[1]


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write but no file can hold."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _type(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else None


def check(tokenizer: Tokenizer) -> Tokenizer:
    """Refuse a tokenizer whose ids depend on more than files can say: nothing ambiguous is read or written."""
    specials = set(tokenizer.special_tokens.values())
    seen: set[tuple[bytes, bytes]] = set()
    for left, right in tokenizer.merges:
        if (left, right) in seen:  # we would take the first, others take the last
            raise ValueError(f"Merges are all different; {left!r} + {right!r} comes twice. Leave one out.")
        seen.add((left, right))
    owner: dict[bytes, int] = {}
    for token, data in tokenizer.vocab.items():  # from the lowest id, which is the one that merges make
        if data in owner and (owner[data] in specials or token not in specials):
            raise ValueError(
                f"No two tokens have the same bytes; {owner[data]} and {token} are both {data!r}. Leave one out."
            )
        owner.setdefault(data, token)
    return tokenizer
