"""Learning-rate schedules against closed forms written out here, and the properties that every schedule has."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.torchlm.schedule import KINDS, learning_rate

PLAN: dict[str, Any] = {"peak": 2.0, "steps": 101, "warmup": 20, "floor": 0.1, "decay_share": 0.25}


def rates(kind: str, **changes: Any) -> list[float]:
    plan = {**PLAN, **changes}
    return [learning_rate(step, kind=kind, **plan) for step in range(plan["steps"])]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    steps = draw(st.integers(1, 60))
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "peak": draw(st.floats(1e-6, 10)),
        "steps": steps,
        "warmup": draw(st.integers(0, steps)),
        "floor": draw(st.floats(0, 1)),
        "decay_share": draw(st.floats(0, 1, exclude_min=True)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_in_equal_steps_to_the_peak(kind: str) -> None:
    assert rates(kind)[:20] == pytest.approx([0.1 * number for number in range(1, 21)])
    assert rates(kind)[20] == 2.0


def test_cosine_falls_along_half_a_wave() -> None:
    mean, amplitude = (2.0 + 0.2) / 2, (2.0 - 0.2) / 2
    expected = [mean + amplitude * math.cos(math.pi * n / 80) for n in range(81)]
    assert rates("cosine")[20:] == pytest.approx(expected)
    assert rates("cosine")[60] == pytest.approx(mean)


def test_linear_falls_by_the_same_amount_each_step() -> None:
    assert rates("linear")[20:] == pytest.approx([2.0 - 1.8 * n / 80 for n in range(81)])


def test_wsd_is_level_and_then_falls_over_the_last_share() -> None:
    # A quarter of 101 steps is 25: from the peak at step 76 to the floor at step 100.
    assert rates("wsd")[20:77] == [2.0] * 57
    assert rates("wsd")[76:] == pytest.approx([2.0 - 1.8 * n / 24 for n in range(25)])


def test_wsd_with_all_steps_to_decay_is_linear() -> None:
    assert rates("wsd", decay_share=1.0) == rates("linear")


def test_constant_stays() -> None:
    assert rates("constant")[20:] == [2.0] * 81


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_floor_to_the_bit(kind: str) -> None:
    for floor in (0.0, 0.1, 1.0):
        assert rates(kind, floor=floor)[-1] == floor * 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_step_and_one_of_warm_up_alone_have_the_peak(kind: str) -> None:
    assert rates(kind, steps=1, warmup=0) == [2.0]
    assert rates(kind, steps=1, warmup=1) == [2.0]
    assert rates(kind, steps=4, warmup=4) == [0.5, 1.0, 1.5, 2.0]
    assert rates(kind, steps=4, warmup=3)[3] == 2.0


@given(plans())
def test_rates_rise_to_the_peak_and_never_rise_again(plan: dict[str, Any]) -> None:
    seen = [learning_rate(step, **plan) for step in range(plan["steps"])]
    warmup, peak = plan["warmup"], plan["peak"]
    assert all(a < b for a, b in itertools.pairwise(seen[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(seen[warmup:]))
    assert max(seen) == peak
    assert min(seen[warmup:], default=peak) >= plan["floor"] * peak


@given(plans(), st.integers(0, 100))
def test_past_the_end_the_last_rate_stays(plan: dict[str, Any], beyond: int) -> None:
    last = learning_rate(plan["steps"] - 1, **plan)
    assert learning_rate(plan["steps"] + beyond, **plan) == last


@given(plans())
def test_there_is_no_jump(plan: dict[str, Any]) -> None:
    """After the warm-up no step falls by more than π/2 times the even share of the way from the peak to the floor."""
    seen = [learning_rate(step, **plan) for step in range(plan["steps"])][plan["warmup"] :]
    falling = len(seen) if plan["kind"] != "wsd" else min(len(seen), round(plan["decay_share"] * plan["steps"]))
    steepest = plan["peak"] * (1 - plan["floor"]) * math.pi / 2 / max(1, falling - 1)
    assert all(a - b <= steepest + 1e-12 * plan["peak"] for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "cosin"}, "one of cosine, linear, wsd, constant; got 'cosin'"),
        ({"steps": 0}, "1 step or more; got steps=0"),
        ({"warmup": 102}, "from 0 to the number of steps; got warmup=102 of 101"),
        ({"warmup": -1}, "got warmup=-1"),
        ({"floor": 1.5}, "from 0 to 1; got 1.5"),
        ({"floor": math.nan}, "from 0 to 1; got nan"),
        ({"decay_share": 0.0}, "above 0 and at most 1; got 0.0"),
        ({"decay_share": 1.1}, "above 0 and at most 1; got 1.1"),
        ({"peak": 0.0}, "above 0 and finite; got 0.0"),
        ({"peak": math.inf}, "above 0 and finite; got inf"),
        ({"step": -1}, "count from 0; got step -1"),
    ],
)
def test_what_makes_no_schedule_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words + r".*\. [A-Z].*\.$"):
        learning_rate(**{"step": 3, "kind": "cosine", **PLAN, **change})
