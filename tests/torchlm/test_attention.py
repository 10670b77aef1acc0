"""Attention's two paths against each other and float64, grouped heads, angles, and the cache of keys and values.

Whole models against the oracle are in test_model.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.config import ModelConfig
from fuselm.torchlm.attention import Angles, attend, rope_tables
from fuselm.torchlm.cache import Cache, LayerCache
from fuselm.torchlm.model import Transformer
from tests.torchlm import oracle

PATHS = ["sdpa", "written"]
SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "context": 9,
    "num_layers": 2,
    "width": 16,
    "num_heads": 4,
    "ffn_width": 24,
}
KINDS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_kv_heads": 2, "qk_norm": True},
    "mla": {"attention": "latent", "kv_latent": 8, "rope_head_dim": 6, "q_latent": 12},
    "learned": {"positions": "learned", "norm": "layer", "bias": True, "num_kv_heads": 1},
    "moe": {"num_experts": 4, "shared_expert": True},
}
OPS = ops.choose("auto", device="cpu")


def vectors(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model_of(kind: str, **more: Any) -> Transformer:
    return oracle.stirred(ModelConfig(**{**SMALL, **KINDS[kind], **more})).eval()


# ---- what a query sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 1), (1, 6), (3, 7)])
def test_queries_are_the_last_of_the_keys_and_see_what_is_before_them(path: str, queries: int, keys: int) -> None:
    """Keys and values of different widths, as in latent attention, and two query heads to a key head."""
    q, k, v = vectors(2, queries, 4, 6, seed=1), vectors(2, keys, 2, 6, seed=2), vectors(2, keys, 2, 3, seed=3)
    found = attend(q, k, v, ops=OPS, path=path, dropout=0.0)
    assert found.shape == (2, queries, 4, 3)
    for row, place, head in np.ndindex(2, queries, 4):
        visible = keys - queries + place + 1
        key, value = (t[row, :visible, head // 2].double().numpy() for t in (k, v))
        shares = oracle.softmax(key @ q[row, place, head].double().numpy() / math.sqrt(6))
        np.testing.assert_allclose(found[row, place, head].numpy(), shares @ value, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 6)])
def test_both_paths_have_the_same_gradients(queries: int, keys: int) -> None:
    given = [vectors(2, queries, 4, 6, seed=1), vectors(2, keys, 2, 6, seed=2), vectors(2, keys, 2, 6, seed=3)]
    wanted = vectors(2, queries, 4, 6, seed=4)
    found = []
    for path in PATHS:
        q, k, v = (tensor.clone().requires_grad_() for tensor in given)
        y = attend(q, k, v, ops=OPS, path=path, dropout=0.0)
        found.append((y, *torch.autograd.grad(y, (q, k, v), wanted)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("path", PATHS)
def test_shared_heads_are_heads_that_are_alike(path: str) -> None:
    q, k, v = vectors(2, 5, 6, 4, seed=1), vectors(2, 5, 2, 4, seed=2), vectors(2, 5, 2, 4, seed=3)
    grouped = attend(q, k, v, ops=OPS, path=path, dropout=0.0)
    repeated = attend(q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2), ops=OPS, path=path, dropout=0.0)
    torch.testing.assert_close(grouped, repeated, rtol=0, atol=2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_a_key_head_for_every_query_head_is_plain_attention(path: str) -> None:
    ids = oracle.some_ids(2, 9, 13)
    plain, grouped = (model_of("mha", attention_path=path, num_kv_heads=heads) for heads in (None, 4))
    assert torch.equal(plain(ids), grouped(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_written_out_attention_is_torchs(kind: str) -> None:
    ids, targets = oracle.some_ids(2, 9, 13), oracle.some_ids(2, 9, 13, seed=1)
    found = []
    for path in PATHS:
        model = model_of(kind, attention_path=path)
        found.append((model(ids), *torch.autograd.grad(model.loss(ids, targets)[0], list(model.parameters()))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_dropout_takes_shares_and_lifts_the_rest(path: str) -> None:
    """With values of 1 each result is the sum of a query's shares: 1, or with dropout 1 on average."""
    q, k, v = vectors(4, 32, 8, 6, seed=1), vectors(4, 32, 8, 6, seed=2), torch.ones(4, 32, 8, 6)
    torch.testing.assert_close(attend(q, k, v, ops=OPS, path=path, dropout=0.0), v, rtol=0, atol=2e-6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = attend(q, k, v, ops=OPS, path=path, dropout=0.5)[..., 0]  # [4, 32, 8]
    # A query's sum of squared shares is 0.2 on average here: a mean of 1024 sums scatters by 0.015.
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.075)
    assert dropped.std().item() > 0.2
    assert (dropped[:, 0] % 2 == 0).all()  # the first query sees one key: nothing, or twice its value


# ---- angles ---------------------------------------------------------------------------------------------------------


def test_angles_are_rounded_once() -> None:
    cos, sin = rope_tables(5000, 16, 10_000.0)
    angles = np.outer(np.arange(5000), 10_000.0 ** (-np.arange(0, 16, 2) / 16))
    # One rounding is at most half a step of fp32 below 1, 2^-25; the rest is for float64's own.
    np.testing.assert_allclose(cos.double().numpy(), np.cos(angles), rtol=0, atol=2**-25 + 1e-11)
    np.testing.assert_allclose(sin.double().numpy(), np.sin(angles), rtol=0, atol=2**-25 + 1e-11)


def test_only_distances_matter_to_rope() -> None:
    """The same tokens four places further on attend to one another as before."""
    attention: Any = model_of("mha").layers[0].attention
    x, angles = vectors(1, 5, 16, seed=1), rope_tables(9, 4, 10_000.0)
    here, further_on = (attention(x, Angles(angles.cos[at : at + 5], angles.sin[at : at + 5])) for at in (0, 4))
    torch.testing.assert_close(here, further_on, rtol=0, atol=5e-6)
    unturned = attention(x, Angles(torch.ones(5, 2), torch.zeros(5, 2)))
    assert (here - unturned).abs().max() > 0.01


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [[1] * 9, [4, 5], [5, 1, 1, 2], [9]], ids=str)
@torch.no_grad()
def test_tokens_in_parts_give_what_they_give_at_once(kind: str, path: str, parts: list[int]) -> None:
    model = model_of(kind, attention_path=path)
    ids = oracle.some_ids(3, 9, 13)
    cache = Cache(num_layers=2, batch=3, context=9)
    hidden = []
    for part in ids.split(parts, dim=1):
        start = cache.length
        hidden.append(model.hidden(part, cache)[0])
        assert [layer.length for layer in cache.layers] == [start + part.shape[1]] * 2
    torch.testing.assert_close(torch.cat(hidden, dim=1), model.hidden(ids)[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_two_caches_of_one_model_do_not_meet() -> None:
    model = model_of("gqa")
    one, other = oracle.some_ids(2, 6, 13, seed=1), oracle.some_ids(2, 6, 13, seed=2)
    first, second = (Cache(num_layers=2, batch=2, context=9) for _ in range(2))
    model.hidden(one[:, :4], first)
    model.hidden(other[:, :4], second)
    torch.testing.assert_close(model.hidden(one[:, 4:], first)[0], model.hidden(one)[0][:, 4:], rtol=0, atol=1e-5)


def test_a_full_cache_refuses_and_stays_as_it_was() -> None:
    cache = LayerCache(batch=2, context=4)
    keys, values = vectors(2, 3, 1, 6, seed=1), vectors(2, 3, 1, 6, seed=2)
    cache.append(keys, values)
    with pytest.raises(ValueError, match=r"holds 4 tokens of 2 rows; got tokens up to 5 of 2 rows. Make a larger one"):
        cache.append(keys[:, :2], values[:, :2])
    all_keys, all_values = cache.append(keys[:, :1], values[:, :1])
    assert torch.equal(all_keys, torch.cat((keys, keys[:, :1]), dim=1))
    assert torch.equal(all_values, torch.cat((values, values[:, :1]), dim=1))


def test_other_rows_than_a_cache_has_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens of 2 rows; got tokens up to 3 of 1 rows"):
        LayerCache(batch=2, context=4).append(vectors(1, 3, 1, 6, seed=1), vectors(1, 3, 1, 6, seed=2))


@pytest.mark.parametrize("kind", ["mha", "learned"])
@torch.no_grad()
def test_a_cache_does_not_reach_beyond_the_context(kind: str) -> None:
    model = model_of(kind)
    cache = Cache(num_layers=2, batch=1, context=20)  # more than the model has places
    model.hidden(oracle.some_ids(1, 8, 13), cache)
    with pytest.raises(ValueError, match="at most context = 9 tokens; got 10"):
        model.hidden(oracle.some_ids(1, 2, 13), cache)
    assert cache.length == 8


@torch.no_grad()
def test_a_cache_shorter_than_the_context_refuses_what_it_cannot_hold() -> None:
    model = model_of("mla")
    cache = Cache(num_layers=2, batch=1, context=4)
    with pytest.raises(ValueError, match="This cache holds 4 tokens of 1 rows; got tokens up to 5"):
        model.hidden(oracle.some_ids(1, 5, 13), cache)
    assert cache.length == 0
