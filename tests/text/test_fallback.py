"""Without a compiler: one warning that says why, then the same ids in plain Python."""

from __future__ import annotations

import functools
import warnings

import pytest

from fuselm import compiler
from fuselm.text import bpe, native, reference
from fuselm.text.bpe import train_bpe
from fuselm.text.tokenizer import Tokenizer
from tests.text.samples import mixture, needs_compiler

SPECIALS = ["<|endoftext|>", "<|two words|>"]


def without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library looked for anew, and the one that is loaded found again after the test."""
    monkeypatch.setattr(native, "library", functools.cache(native.library.__wrapped__))
    monkeypatch.setattr(bpe, "backend", functools.cache(bpe.backend.__wrapped__))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without_caches(monkeypatch)
    monkeypatch.setattr(compiler, "find_host_compiler", lambda: None)


def everything(text: str) -> list:
    """Train, encode in every way, decode."""
    vocab, merges = train_bpe([text], 256 + 40 + 2, SPECIALS, threads=2)
    tokenizer = Tokenizer(vocab, merges, SPECIALS)
    options = {"allowed_special": "all"}
    ids = tokenizer.encode(text, **options, threads=2)
    same = [
        tokenizer.encode_array(text, **options).tolist(),
        list(tokenizer.encode_iterable(text.splitlines(keepends=True), **options)),
        tokenizer.encode_batch([text, ""], **options)[0],
    ]
    assert same == [ids] * 3
    with pytest.raises(ValueError, match="contains the special token"):
        tokenizer.encode(text)
    ordinary = tokenizer.encode_ordinary(text)
    return [
        vocab,
        merges,
        ids,
        ordinary,
        tokenizer.decode(ids),
        tokenizer.decode([-1, *ids, 1 << 70]),
        tokenizer.fingerprint,
    ]


def test_first_use_warns_and_later_ones_do_not(no_compiler: None) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"plain Python, hundreds of times slower.* g\+\+; it is not on PATH\. Install"
    ):
        assert bpe.backend() is reference
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        Tokenizer(*train_bpe(["some text"], 256)).encode("text")
    assert later == []


@needs_compiler
@pytest.mark.parametrize("size", [50, 1 << 19])
def test_results_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch, set_block_size, size: int) -> None:
    set_block_size(size)
    text = mixture(4000).replace("\n\n", "<|endoftext|>").replace(". ", "<|two words|> ")
    native_results = everything(text)
    assert bpe.backend() is native
    without_caches(monkeypatch)
    monkeypatch.setattr(compiler, "find_host_compiler", lambda: None)
    with pytest.warns(RuntimeWarning, match="plain Python"):
        assert bpe.backend() is reference
    assert everything(text) == native_results


def test_compiler_that_fails_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, pretend_compilers) -> None:
    without_caches(monkeypatch)
    pretend_compilers.install("g++", extra="echo 'bpe.cpp:1: error: no C++20 here'; exit 1")
    with pytest.warns(RuntimeWarning, match=r"(?s)plain Python.*bpe\.cpp did not compile.*no C\+\+20 here"):
        assert bpe.backend() is reference


def test_library_that_cannot_be_loaded_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, pretend_compilers) -> None:
    without_caches(monkeypatch)  # what the pretended compiler writes is no library
    with pytest.warns(RuntimeWarning, match=r"(?s)plain Python.*bpe-[0-9a-f]+\.so"):
        assert bpe.backend() is reference


def test_characters_need_no_library(no_compiler: None) -> None:
    tokenizer = Tokenizer.characters("abc", ["<x>"])
    assert tokenizer.encode("ab<x>", allowed_special="all") == [0, 1, 3]


@pytest.mark.parametrize("backend", [pytest.param(native, marks=needs_compiler), reference])
def test_both_backends_have_what_bpe_asks_of_them(backend) -> None:
    name = backend.__name__.rpartition(".")[2].title()
    trainer, encoder = getattr(backend, f"{name}Trainer"), getattr(backend, f"{name}Encoder")
    for protocol, made in ((bpe.Trainer, trainer), (bpe.Encoder, encoder)):
        wanted = {method for method in vars(protocol) if not method.startswith("_")}
        assert wanted
        assert wanted <= set(dir(made))
    assert callable(backend.decode)
    assert callable(backend.split)
