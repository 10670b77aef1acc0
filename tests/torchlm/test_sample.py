"""Sampling against the model run anew for every token, and what it promises of seeds, stops, limits and ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fuselm.config import ModelConfig
from fuselm.torchlm.model import Transformer
from fuselm.torchlm.sample import Sample, _draw, sample
from tests.torchlm import oracle

SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "context": 12,
    "num_layers": 2,
    "width": 16,
    "num_heads": 4,
    "ffn_width": 24,
}
KINDS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_kv_heads": 2},
    "mla": {"attention": "latent", "kv_latent": 8, "rope_head_dim": 6},
    "learned": {"positions": "learned", "norm": "layer", "bias": True},
    "softcap": {"softcap": 3.0},
    "moe": {"num_experts": 4},
}
PROMPT = [3, 1, 4]


def model_of(kind: str = "mha", **more: Any) -> Transformer:
    return oracle.stirred(ModelConfig(**{**SMALL, **KINDS[kind], **more}))


def lively() -> Transformer:
    """A model that is sure of little: its samples differ."""
    model = model_of()
    with torch.no_grad():
        model.head_weight.mul_(0.3)
    return model


@torch.no_grad()
def next_shares(model: Transformer, ids: list[int]) -> torch.Tensor:
    return torch.softmax(model.eval()(torch.tensor([ids]))[0, -1].double(), dim=-1)  # [V]


# ---- what is drawn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_0_each_token_is_the_likeliest(kind: str) -> None:
    model = model_of(kind)
    ids = list(PROMPT)
    for _ in range(8):
        ids.append(int(next_shares(model, ids).argmax()))
    rows = sample(model, PROMPT, count=2, max_tokens=8, temperature=0)
    assert rows == [Sample(ids[3:], False)] * 2
    assert len(set(ids[3:])) > 1


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 4), (1.0, 13), (1.0, 50)])
def test_tokens_are_drawn_as_often_as_the_model_says(temperature: float, top_k: int | None) -> None:
    model, count = lively(), 4000
    shares = next_shares(model, PROMPT) ** (1 / temperature)
    if top_k is not None and top_k < 13:
        shares[shares < shares.topk(top_k).values[-1]] = 0.0
    shares /= shares.sum()
    rows = sample(model, PROMPT, count=count, max_tokens=1, temperature=temperature, top_k=top_k, seed=5)
    drawn = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=13)
    for token in range(13):
        share = float(shares[token])
        # Five standard deviations; a token outside the top k has neither share nor deviation.
        assert abs(int(drawn[token]) - count * share) <= 5 * math.sqrt(count * share * (1 - share)), token


def test_the_first_k_of_one_is_the_likeliest() -> None:
    model = lively()
    assert sample(model, PROMPT, max_tokens=6, top_k=1, seed=3) == sample(model, PROMPT, max_tokens=6, temperature=0)


def test_rows_go_on_from_what_each_has_drawn() -> None:
    """Each token of each row is among the three likeliest for the model that is run anew on that very row."""
    model = lively()
    rows = sample(model, PROMPT, count=6, max_tokens=8, top_k=3, seed=2)
    assert len({tuple(row.ids) for row in rows}) == 6
    for row in rows:
        for index, token in enumerate(row.ids):
            assert token in next_shares(model, PROMPT + row.ids[:index]).topk(3).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_the_tokenizer_has_not_are_never_drawn(temperature: float) -> None:
    model = model_of()
    with torch.no_grad():
        model.head_weight[10:] *= 100.0  # the padding of a head, made louder than all words
    options: dict[str, Any] = {"count": 40, "max_tokens": 9, "temperature": temperature, "top_k": 5}
    assert max(max(row.ids) for row in sample(model, PROMPT, **options)) >= 10
    assert max(max(row.ids) for row in sample(model, PROMPT, vocab_size=10, **options)) < 10


# ---- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("top_k", [None, 3])
def test_logits_that_are_no_numbers_are_drawn_from_all_the_same(value: float, top_k: int | None) -> None:
    logits = torch.full((2, 8), value)
    drawn = _draw(logits, 0.7, top_k, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 1)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 8


def test_a_seed_decides_the_samples() -> None:
    model = lively()
    one, twin, other = (sample(model, PROMPT, count=3, max_tokens=9, seed=seed) for seed in (1, 1, 2))
    assert one == twin
    assert one != other


def test_no_global_state_is_touched_and_none_is_read() -> None:
    model = model_of(dropout=0.5)
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            found.append(sample(model, PROMPT, count=2, max_tokens=9, seed=4))
            assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_sampled_without_dropout_and_left_as_it_was(training: bool) -> None:
    model = model_of(dropout=0.5).train(training)
    with_dropout = sample(model, PROMPT, max_tokens=9, temperature=0)
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert with_dropout == sample(model_of(dropout=0.0), PROMPT, max_tokens=9, temperature=0)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_row_and_is_left_out() -> None:
    model = lively()
    free = sample(model, PROMPT, count=20, max_tokens=9, seed=1)
    stop = free[0].ids[4]
    stopped = sample(model, PROMPT, count=20, max_tokens=9, seed=1, stop=stop)
    assert any(row.finished for row in stopped)
    assert any(not row.finished for row in stopped)
    for whole, cut in zip(free, stopped, strict=True):
        found = stop in whole.ids
        assert cut == Sample(whole.ids[: whole.ids.index(stop)] if found else whole.ids, found)


def test_sampling_ends_when_every_row_has() -> None:
    model, seen = model_of(), []
    greedy = sample(model, PROMPT, max_tokens=9, temperature=0)[0].ids
    stop = next(token for token in greedy if token != greedy[0])
    last = greedy.index(stop)
    rows = sample(
        model, PROMPT, count=3, max_tokens=9, temperature=0, stop=stop, on_progress=lambda *at: seen.append(at)
    )
    assert rows == [Sample(greedy[:last], True)] * 3
    assert seen == [(step, 9) for step in range(1, last + 2)]  # the stop token itself was the last that was drawn


def test_max_tokens_is_the_most_that_comes() -> None:
    for tokens in (0, 1, 5):
        rows = sample(model_of(), PROMPT, count=2, max_tokens=tokens, stop=None)
        assert [len(row.ids) for row in rows] == [tokens, tokens]


@pytest.mark.parametrize(("prompt", "room"), [(1, 12), (3, 10), (12, 1)])
def test_a_row_ends_where_the_context_is_full(prompt: int, room: int) -> None:
    """The last token drawn is the one after the last place: nothing more needs to read it."""
    ids = oracle.some_ids(1, prompt, 13)[0].tolist()
    rows = sample(model_of("learned"), ids, count=2, max_tokens=100)
    assert [len(row.ids) for row in rows] == [room, room]


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "a prompt of one token or more; got 0 tokens"),
        ([1], {"count": 0}, "got 1 tokens, 0 rows"),
        ([1], {"temperature": -0.1}, "temperature is 0 or more and finite; got -0.1"),
        ([1], {"temperature": math.inf}, "temperature is 0 or more and finite; got inf"),
        ([1], {"temperature": math.nan}, "temperature is 0 or more and finite; got nan"),
        ([1], {"top_k": 0}, "top_k is at least 1, or None for all; got 0"),
        ([1], {"top_k": -3}, "top_k is at least 1, or None for all; got -3"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompt: list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample(model_of(), prompt, **options)


def test_a_failed_sample_leaves_the_model_as_it_was() -> None:
    model = model_of().train()
    with pytest.raises(ValueError, match=r"below the number of rows of weight; got 99 at"):
        sample(model, [99])
    assert model.training


def test_a_tiny_temperature_is_the_likeliest_token() -> None:
    model = lively()
    assert sample(model, [1], max_tokens=5, temperature=1e-39) == sample(model, [1], max_tokens=5, temperature=0)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"at most context = \d+ tokens; got \d+\. Cut it"):
        sample(model, [1] * (model.config.context + 1))
