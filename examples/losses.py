"""The end of a language model in plain torch and in fuselm: a norm, a head and its loss, written three ways.

Runs on the CPU and on CUDA, and says which. The last way never holds all logits: a block of rows at a time is made,
turned into losses and gradients where it lies, and forgotten.

    python examples/losses.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fuselm
from fuselm.kernels.torch_ops import cuda_state

B, T, D, V = 4, 64, 128, 2000  # batch, tokens, model width, vocabulary


def difference(ours: Tensor, theirs: Tensor) -> str:
    """The largest difference, beside the largest number there is."""
    return f"{float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()):.2e}"


def main() -> None:
    """Compare losses and gradients with torch's, then leave out what does not count."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs, ours = torch.nn.LayerNorm(D, device=device), fuselm.nn.LayerNorm(D, device=device)
    ours.load_state_dict(theirs.state_dict())  # the checkpoint stays what it is
    x = torch.randn(B, T, D, device=device, requires_grad=True)  # (B, T, D)
    head = torch.randn(V, D, device=device).div_(D**0.5).requires_grad_()  # (V, D)
    targets = torch.randint(V, (B, T), device=device)  # (B, T)

    expected = F.cross_entropy(F.linear(theirs(x), head).flatten(0, 1), targets.flatten())
    right = torch.autograd.grad(expected, [x, head])
    print(f"torch: loss {expected:.4f} of {B * T} targets, for which it held {B * T * V:,} logits")

    ways = {
        "cross_entropy": fuselm.ops.cross_entropy(F.linear(ours(x), head), targets),
        # Classes are the second dimension, as in torch.nn.CrossEntropyLoss.
        "nn.CrossEntropyLoss": fuselm.nn.CrossEntropyLoss()(F.linear(ours(x), head).movedim(-1, 1), targets),
        # 64 rows of logits at a time.
        "linear_cross_entropy": fuselm.ops.linear_cross_entropy(ours(x), head, targets, max_bytes=64 * V * 4),
    }
    for name, loss in ways.items():
        found = [difference(a, b) for a, b in zip(torch.autograd.grad(loss, [x, head]), right, strict=True)]
        print(f"{name}: max difference of loss {difference(loss, expected)}, dx {found[0]}, dhead {found[1]}")

    # What is padded does not count: loss 0, gradient 0, and no share in the mean.
    padded = targets.index_fill(1, torch.arange(T // 2, T, device=device), -100)
    losses = fuselm.ops.cross_entropy(F.linear(ours(x), head), padded, reduction="none")  # (B, T)
    mean = fuselm.ops.cross_entropy(F.linear(ours(x), head), padded, label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
    print(f"padded: {int((losses == 0).sum())} of {losses.numel()} losses are 0; smoothed, with z-loss: {mean:.4f}")
    print(f"what ran: {cuda_state() + ' on CUDA' if device == 'cuda' else 'plain torch on the CPU'}")


if __name__ == "__main__":
    main()
