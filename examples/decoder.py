"""Put the ops into a model of your own: a decoder of one block, trained by fuselm's AdamW on a toy task.

Runs on the CPU and on CUDA, and says which. The task is to say again what was said LAG words ago: the block must learn
where to look, which RoPE tells it, and to copy what it finds there.

    python examples/decoder.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fuselm
from fuselm.kernels.torch_ops import cuda_state
from fuselm.optim import AdamW, clip_scale, decay_groups, global_norm

B, T, D, N, F, V = 16, 24, 32, 2, 64, 16  # batch, tokens, model width, heads, feed-forward width, vocabulary
H = D // N  # head dimension
LAG, STEPS = 3, 60


class Decoder(torch.nn.Module):
    """Embedding, attention, a gated MLP and a head on the embedding's weight; matmuls are torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = fuselm.nn.Embedding(V, D)
        self.rotary = fuselm.nn.RotaryEmbedding(H, max_positions=T)
        self.attention_norm, self.mlp_norm, self.last_norm = (fuselm.nn.RMSNorm(D, eps=1e-6) for _ in range(3))
        self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
        self.project = torch.nn.Linear(D, D, bias=False)
        self.gate_up = torch.nn.Linear(D, 2 * F, bias=False)
        self.down = torch.nn.Linear(F, D, bias=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)  # it is the head as well

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of ids (B, T) whose next words are targets (B, T)."""
        x = self.embedding(ids)  # (B, T, D)
        q, k, v = self.qkv(self.attention_norm(x)).view(B, T, 3, N, H).unbind(2)  # (B, T, N, H) each
        q, k = self.rotary(q, k)  # both in one launch, as they lie in qkv
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)  # (B, N, T, T)
        shares = fuselm.ops.softmax(scores, scale=H**-0.5, causal=True)  # (B, N, T, T)
        heard = (shares @ v.transpose(1, 2)).transpose(1, 2).flatten(2)  # (B, T, D)
        y, x = self.mlp_norm(self.project(heard), x)  # x + what was heard, and the norm of that: one call
        x = fuselm.ops.add(x, self.down(fuselm.ops.swiglu(self.gate_up(y))))  # gate and up are halves of one tensor
        loss: Tensor = fuselm.ops.linear_cross_entropy(self.last_norm(x), self.embedding.weight, targets)
        return loss


def batch(device: str) -> tuple[Tensor, Tensor]:
    """LAG random words again and again, and the same one place ahead."""
    words = torch.randint(V, (B, LAG), device=device).repeat(1, T // LAG + 1)[:, : T + 1]  # (B, T + 1)
    targets = words[:, 1:].clone()
    targets[:, : LAG - 1] = -100  # new words, which nobody can know: they do not count
    return words[:, :-1], targets


def main() -> None:
    """Train, and say whether that taught it anything."""
    torch.set_num_threads(1)  # so small a model gains nothing by more, and on a busy machine waits for them
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder().to(device)
    # torch.optim.AdamW's arguments; matrices decay, weights of norms do not.
    optimizer = AdamW(decay_groups(model.named_parameters(), weight_decay=0.1), lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for _ in range(STEPS):
        loss = model(*batch(device))
        loss.backward()
        # All parameters in one launch; the clip factor stays on the device, so nothing waits for it.
        norm = global_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step(grad_scale=clip_scale(norm, 1.0))
        optimizer.zero_grad()
        losses.append(loss.detach())
    first, last = float(losses[0]), float(torch.stack(losses[-5:]).mean())
    print(f"loss fell from {first:.2f} to {last:.2f} in {STEPS} steps")
    print(f"what ran: {cuda_state() + ' on CUDA' if device == 'cuda' else 'plain torch on the CPU'}")


if __name__ == "__main__":
    main()
