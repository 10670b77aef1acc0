"""Swap torch.nn.RMSNorm for fuselm.nn.RMSNorm: the same weights, and numbers as exact.

Runs on the CPU and on CUDA, and says which; there a residual add and its norm are one kernel.

    python examples/rms_norm.py
"""

from __future__ import annotations

import torch

import fuselm
from fuselm.kernels.torch_ops import cuda_state

B, T, D = 4, 128, 1024  # batch, tokens, model width


def main() -> None:
    """Compare forward and backward with torch's module, then add a residual."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = torch.nn.RMSNorm(D, eps=1e-6, device=device)
    ours = fuselm.nn.RMSNorm(D, eps=1e-6, device=device)
    ours.load_state_dict(theirs.state_dict())  # the checkpoint stays what it is

    x = torch.randn(B, T, D, device=device, requires_grad=True)  # (B, T, D)
    dy = torch.randn(B, T, D, device=device)  # (B, T, D)
    y, expected = ours(x), theirs(x)
    gradients = torch.autograd.grad(y, [x, ours.weight], dy)
    expected_gradients = torch.autograd.grad(expected, [x, theirs.weight], dy)

    print(f"y:       max difference to torch.nn.RMSNorm {(y - expected).abs().max():.2e}")
    for name, gradient, right in zip(("dx", "dweight"), gradients, expected_gradients, strict=True):
        print(f"{name + ':':8} max difference to torch.nn.RMSNorm {(gradient - right).abs().max():.2e}")

    # A transformer block adds, then normalises. With the residual as a second argument both are one call.
    residual = torch.randn(B, T, D, device=device)
    y, total = ours(x, residual)
    same_sum, same_norm = torch.equal(total, x + residual), torch.equal(y, ours(total))
    print(f"with a residual: the sum is torch's, {same_sum}; y is the norm of the sum to the bit, {same_norm}")
    print(f"what ran: {cuda_state() + ' on CUDA' if device == 'cuda' else 'plain torch on the CPU'}")


if __name__ == "__main__":
    main()
