"""Learning rates over a training run, as closed forms of the step. Knows numbers alone: no optimizer, no torch.

for step in range(steps):
    rate = learning_rate(step, kind="cosine", peak=3e-4, steps=steps, warmup=100, floor=0.1, decay_share=0.2)
"""

from __future__ import annotations

import math

KINDS = ("cosine", "linear", "wsd", "constant")


def learning_rate(
    step: int, *, kind: str, peak: float, steps: int, warmup: int, floor: float, decay_share: float
) -> float:
    """The learning rate of one step; steps count from 0, and every step past the last has the last one's rate.

    A step s < warmup has peak · (s + 1) / warmup, whatever the kind. After that, with

        x = (s - first) / (steps - 1 - first), which is 0 at step `first` and 1 at the last,

        cosine    first = warmup        peak · (floor + (1 - floor) · (1 + cos πx) / 2)
        linear    first = warmup        peak · (floor + (1 - floor) · (1 - x))
        wsd       peak before first = max(warmup, steps - round(decay_share · steps)), from there on as linear
        constant                        peak

    So each begins at peak and, but for constant, ends at floor · peak. If the decay is a single step (`first` is the
    last step), that step has the peak. `floor` and `decay_share` are checked for every kind and used where they stand
    in the form.
    """
    _check(step, kind, peak, steps, warmup, floor, decay_share)
    step = min(step, steps - 1)
    if step < warmup:
        return peak * ((step + 1) / warmup)  # in this order the last one is the peak to the bit
    first = max(warmup, steps - round(decay_share * steps)) if kind == "wsd" else warmup
    if kind == "constant" or step <= first:
        return peak
    x = (step - first) / (steps - 1 - first)
    left = (1 + math.cos(math.pi * x)) / 2 if kind == "cosine" else 1 - x
    return peak * (floor + (1 - floor) * left)


def _check(step: int, kind: str, peak: float, steps: int, warmup: int, floor: float, decay_share: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"A schedule is one of {', '.join(KINDS)}; got {kind!r}. Take one of those.")
    if steps < 1:
        raise ValueError(f"A schedule has 1 step or more; got steps={steps}. Ask for at least one.")
    if not 0 <= warmup <= steps:
        raise ValueError(
            f"warmup is from 0 to the number of steps; got warmup={warmup} of {steps}. Warm up for fewer steps."
        )
    if step < 0:
        raise ValueError(f"Steps count from 0; got step {step}. Pass the number of steps already taken.")
    if not 0 < peak < math.inf:
        raise ValueError(f"The peak learning rate is above 0 and finite; got {peak}. Try 3e-4.")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor is a share of the peak, from 0 to 1; got {floor}. Try 0.1.")
    if not 0 < decay_share <= 1:
        raise ValueError(f"decay_share is a share of the steps, above 0 and at most 1; got {decay_share}. Try 0.2.")
