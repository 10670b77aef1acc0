"""A corpus and a tokenizer into a folder that training reads: train.tokens, valid.tokens and tokenizer.json.

prepared.json beside them says which files belong together. Every document ends with <|endoftext|>, and one that
contains it is several. Documents are read in one thread and encoded in several; the files are the same bytes whatever
their number. Knows neither where documents come from (corpora.py) nor how a shard is laid out (shards.py), and draws no
progress bar.

    prepare(open_corpus("stories"), Tokenizer.load("tokenizer.json"), Path("data/stories"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fuselm.data.corpora import SEPARATOR, SPLITS, Corpus, CorpusError
from fuselm.data.readers import MANIFEST, TOKENIZER
from fuselm.data.shards import Shard, ShardError, ShardWriter, open_shard
from fuselm.files import whole_folder, write_whole
from fuselm.text.bpe import merges_wanted, train_bpe
from fuselm.text.tokenizer import Tokenizer

FILES = (TOKENIZER, *(f"{split}.tokens" for split in SPLITS), MANIFEST)  # all that it writes
VOCAB_SIZE = 10_000  # of a tokenizer that is trained, unless somebody says otherwise
# Split, bytes of documents read, and about how many there are (None: not known).
Progress = Callable[[str, int, int | None], None]


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Shard]:
    """Tokenise both splits. Until everything is complete, what the folder had before stays as it is."""
    with whole_folder(Path(folder), last=MANIFEST) as staging:
        tokenizer.save(staging / TOKENIZER)  # first: a tokenizer that cannot be saved is noticed before the work
        digests = {}
        for split in SPLITS:
            _tokenise(corpus, split, tokenizer, staging / f"{split}.tokens", threads, on_progress)
            digests[split] = open_shard(staging / f"{split}.tokens").header.sha256
        write_whole(staging / MANIFEST, json.dumps({"tokenizer": tokenizer.fingerprint, **digests}, indent=1) + "\n")
    return open_prepared(folder)


def _tokenise(
    corpus: Corpus, split: str, tokenizer: Tokenizer, path: Path, threads: int | None, on_progress: Progress | None
) -> None:
    writer = ShardWriter(
        path,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        separator=tokenizer.end_of_text,
        # The name alone: the same text in another folder makes the same file.
        source={"corpus": Path(corpus.name).absolute().name, "split": split},
    )
    pieces = _pieces(_watched(corpus, split, on_progress), tokenizer, corpus.name)
    allowed = {SEPARATOR} & set(tokenizer.special_tokens)
    with writer:
        # Other special tokens in the corpus are text: nobody asked for what they mean elsewhere.
        for ids in tokenizer.encode_blocks(pieces, threads=threads, allowed_special=allowed, disallowed_special=()):
            writer.append(ids)


def open_prepared(folder: str | Path) -> dict[str, Shard]:
    """The shards of a prepared folder, checked against its tokenizer and against one another."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShardError(
            f"A prepared folder has {TOKENIZER}, train.tokens, valid.tokens and {MANIFEST}; {folder} lacks the last. "
            "Make one with `fuselm data prepare`."
        ) from None
    except ValueError as error:
        raise ShardError(f"{folder / MANIFEST} is not JSON ({error}). Prepare it again, with --overwrite.") from None
    fingerprint = Tokenizer.load(folder / TOKENIZER).fingerprint
    shards = {split: open_shard(folder / f"{split}.tokens", fingerprint=fingerprint) for split in SPLITS}
    found = {"tokenizer": fingerprint, **{split: shard.header.sha256 for split, shard in shards.items()}}
    if found != manifest:
        raise ShardError(
            f"The files of a prepared folder are made together; those in {folder} are not. Was a run killed while it "
            "replaced them, or a file put there by hand? Prepare it again, with --overwrite."
        )
    return shards


def check_vocab_size(vocab_size: int, special_tokens: Sequence[str] = ()) -> None:
    """Refuse, before a corpus is opened, what `train_tokenizer` would refuse after."""
    merges_wanted(vocab_size, _specials(special_tokens))


def train_tokenizer(
    corpus: Corpus,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Tokenizer:
    """A byte-level BPE of a corpus's training split; <|endoftext|> is always one of its special tokens."""

    def on_merge(stage: str, done: int, total: int | None) -> None:
        if on_progress and stage == "merge":
            on_progress("merge", done, total)

    specials = _specials(special_tokens)
    documents = _watched(corpus, "train", on_progress)
    return Tokenizer(*train_bpe(documents, vocab_size, specials, threads=threads, on_progress=on_merge), specials)


def _specials(special_tokens: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([SEPARATOR, *special_tokens]))


def character_tokenizer(
    corpus: Corpus, special_tokens: Sequence[str] = (), *, on_progress: Progress | None = None
) -> Tokenizer:
    """One token for each character of a corpus, both splits; with <|endoftext|> where there are several documents."""
    characters: set[str] = set()
    documents = 0
    for split in SPLITS:
        count = 0
        for document in _watched(corpus, split, on_progress):
            characters.update(document.decode("utf-8", "replace"))
            count += 1
        documents = max(documents, count)
    specials = dict.fromkeys([*([SEPARATOR] if documents > 1 else []), *special_tokens])
    return Tokenizer.characters("".join(characters), list(specials))


def _watched(corpus: Corpus, split: str, on_progress: Progress | None) -> Iterator[bytes]:
    """The documents of a split, with a word about how far it is now and then."""
    total = corpus.bytes_hint(split) if on_progress else None
    done = told = 0
    for document in corpus.documents(split):
        yield document
        done += len(document)
        if on_progress and done - told > 1 << 20:
            on_progress(split, done, total)
            told = done
    if on_progress:
        on_progress(split, done, done)


def _pieces(documents: Iterable[bytes], tokenizer: Tokenizer, name: str) -> Iterator[bytes]:
    """Documents, each with the separator behind it. A single one can do without."""
    separator = SEPARATOR.encode() if SEPARATOR in tokenizer.special_tokens else b""
    for index, document in enumerate(documents):
        if index and not separator:
            raise CorpusError(
                f"Documents are kept apart by the special token {SEPARATOR}; the tokenizer has none, and {name} has "
                "more than one document. Use a tokenizer with that special token."
            )
        yield document
        if separator:
            yield separator
