"""What the tests of text/ share: a library that is built once, a trained vocabulary, and blocks of a few bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuselm import compiler
from fuselm.text import blocks, bpe, native, tokenizer
from fuselm.text.tokenizer import Tokenizer
from tests.text.samples import mixture

SPECIALS = ["<|endoftext|>", "<|pad|>", "<|two words|>"]


@pytest.fixture(scope="session", autouse=True)
def library_in_a_cache_of_its_own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build in pytest's cache, which outlives the run, and leave the user's alone; every later call finds it loaded."""
    if compiler.find_host_compiler() is None:
        return
    cache = getattr(request.config, "cache", None)  # not there under -p no:cacheprovider
    folder = cache.mkdir("fuselm-text") if cache else tmp_path_factory.mktemp("fuselm-text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSELM_CACHE_DIR", str(folder))
        native.library()


@pytest.fixture(scope="session")
def vocabulary(library_in_a_cache_of_its_own: None) -> tuple[bpe.Vocab, bpe.Merges]:
    """3,000 merges of a text of many kinds, then three special tokens."""
    return bpe.train_bpe([mixture(400_000)], 256 + 3000 + len(SPECIALS), SPECIALS, threads=1)


@pytest.fixture(scope="session")
def trained(vocabulary: tuple[bpe.Vocab, bpe.Merges]) -> Tokenizer:
    """A tokenizer of that vocabulary."""
    return Tokenizer(*vocabulary, SPECIALS)


@pytest.fixture
def set_block_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes blocks so short that a test's text has many."""

    def set_size(size: int) -> None:
        for module in (blocks, bpe, tokenizer):
            monkeypatch.setattr(module, "BLOCK_BYTES", size)

    return set_size
