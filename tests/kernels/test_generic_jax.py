"""Every op in JAX: the same truths, the same refusals, and on CUDA the same bits as PyTorch.

Knows no op by name. The yardstick of the error rule is torch's own kernel on the same device. On the CPU the two
frameworks run different code (jnp, torch); on CUDA the same machine code, so nothing may differ.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fuselm.kernels.spec import BadCall, Case, RefusedInput
from tests.kernels.arrays import Arrays, make_arrays
from tests.kernels.problems import (
    OPS,
    Problem,
    all_numpy,
    as_tuple,
    assert_all_same_bits,
    assert_gradients,
    assert_outputs,
    assert_rounded_alike,
    each_bad_call,
    each_case,
    each_kind,
    make_problem,
    op_of,
    problem_of,
    reference_run,
    refusal,
    run,
    solve,
)

PLATFORMS = ("cpu", pytest.param("gpu", marks=pytest.mark.gpu))
TORCH_DEVICE = {"cpu": "cpu", "gpu": "cuda"}

on_each_platform = pytest.mark.parametrize("platform", PLATFORMS)
over_kinds = pytest.mark.parametrize(("op_name", "case"), each_kind(layouts=False))


def over(on_cpu: list[Any], on_gpu: list[Any], *more: str) -> pytest.MarkDecorator:
    """Cases by platform. On a CPU the time is XLA's, a second a program, and jnp treats fewer cases differently."""
    params = [pytest.param(*param.values, "cpu", id=f"{param.id}-cpu") for param in on_cpu]
    params += [pytest.param(*p.values, "gpu", id=f"{p.id}-gpu", marks=pytest.mark.gpu) for p in on_gpu]
    return pytest.mark.parametrize(("op_name", "case", *more, "platform"), params)


def one_of_each_signature() -> list[Any]:
    """The first case of each op, set of tensors and results."""
    found: dict[Any, Any] = {}
    for param in each_kind(layouts=False):
        op_name, case = param.values
        found.setdefault((op_name, tuple(case.tensors), OPS[op_name].outputs(case)), param)
    return list(found.values())


def told_apart_by_jnp() -> list[Any]:
    """Of cases that differ in width alone the first and the widest; layouts, of which JAX has one, not at all."""
    alike: dict[Any, list[Any]] = {}
    for param in each_case(lambda case: case.layout == "contiguous"):
        op_name, case = param.values
        shape = (len(case.shape), 1 in case.shape, case.size > 0)
        one = dataclasses.replace(case, name="", shape=())
        alike.setdefault((op_name, repr(one), shape), []).append(param)
    return [p for params in alike.values() for p in {q.id: q for q in (params[0], max(params, key=width_of))}.values()]


def width_of(param: Any) -> int:
    return int(param.values[1].shape[-1])


class OnPlatform:
    """An op of fuselm.jax with its arrays on one kind of device.

    `programs` keeps what jit has made: most of the time of these tests is XLA's, and several of them run one program.
    """

    def __init__(self, jax: ModuleType, platform: str, programs: dict[str, Any]) -> None:
        self.jax, self.programs = jax, programs
        try:
            self.device = jax.devices(platform)[0]
        except RuntimeError:
            pytest.skip(f"JAX sees no {platform}")
        if platform == "gpu" and not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")

    def arrays(self, arrays: Arrays) -> dict[str, Any]:
        return {name: self.jax.device_put(array, self.device) for name, array in arrays.items()}

    def function(self, problem: Problem) -> Any:
        """The op of a problem: dict of arrays in, dict of arrays out."""
        import fuselm.jax

        op, options = getattr(fuselm.jax, problem.op.name), problem.case.options
        names = problem.op.outputs(problem.case)
        return lambda inputs: dict(zip(names, as_tuple(op(**inputs, **options)), strict=True))

    def jitted(self, what: str, problem: Problem, function: Any) -> Any:
        """The function under jit, compiled once for all problems that differ in their numbers alone."""
        key = f"{what} {problem.op.name} {dataclasses.replace(problem.case, name='')!r}"
        return self.programs.setdefault(key, self.jax.jit(function))

    def forward(self, problem: Problem) -> Arrays:
        """Outputs under jit."""
        return fetched(self.jitted("outputs", problem, self.function(problem))(self.arrays(problem.inputs)))

    def run(self, problem: Problem, jit: bool) -> tuple[Arrays, Arrays]:
        """Outputs and gradients of every differentiable input."""
        function = self.function(problem)
        inputs = self.arrays(problem.inputs)
        fixed = {name: array for name, array in inputs.items() if name not in problem.differentiable}
        wanted = {name: inputs[name] for name in problem.differentiable}

        def outputs_and_gradients(wanted: dict[str, Any], fixed: dict[str, Any], cotangents: dict[str, Any]) -> Any:
            outputs, pull_back = self.jax.vjp(lambda some: function(some | fixed), wanted)
            return outputs, pull_back(cotangents)[0]

        call = self.jitted("both", problem, outputs_and_gradients) if jit else outputs_and_gradients
        outputs, gradients = call(wanted, fixed, self.arrays(problem.cotangents))
        return fetched(outputs), fetched({name: gradients[name] for name in problem.differentiable})


def fetched(arrays: dict[str, Any]) -> Arrays:
    return {name: np.asarray(array) for name, array in arrays.items()}


@pytest.fixture(scope="session")
def programs() -> dict[str, Any]:
    return {}


@pytest.fixture
def here(jax: ModuleType, platform: str, programs: dict[str, Any]) -> OnPlatform:
    return OnPlatform(jax, platform, programs)


@over(told_apart_by_jnp(), each_case())
def test_outputs_and_gradients_are_as_exact_as_torchs(
    op_name: str, case: Case, platform: str, here: OnPlatform
) -> None:
    problem = problem_of(op_name, case)
    outputs, gradients = here.run(problem, jit=True)
    reference_outputs, reference_gradients = reference_run(op_name, case, TORCH_DEVICE[platform])
    assert_outputs(problem, outputs, reference_outputs)
    if problem.op.rounds_alike:
        assert_rounded_alike(outputs, reference_outputs)
    assert tuple(gradients) == problem.differentiable
    assert_gradients(problem, gradients, reference_gradients)


@on_each_platform
@over_kinds
def test_outputs_without_gradients_are_the_same(op_name: str, case: Case, platform: str, here: OnPlatform) -> None:
    problem = problem_of(op_name, case)
    assert_all_same_bits(here.forward(problem), here.run(problem, jit=True)[0])


@over(one_of_each_signature(), each_kind(layouts=False))
def test_without_jit_results_are_as_exact(op_name: str, case: Case, platform: str, here: OnPlatform) -> None:
    """Not the same bits on the CPU: XLA fuses jnp under jit, and rounds less often."""
    problem = problem_of(op_name, case)
    outputs, gradients = here.run(problem, jit=False)
    reference_outputs, reference_gradients = reference_run(op_name, case, TORCH_DEVICE[platform])
    assert_outputs(problem, outputs, reference_outputs)
    assert_gradients(problem, gradients, reference_gradients)
    if platform == "gpu" and problem.op.same_bits:
        jitted_outputs, jitted_gradients = here.run(problem, jit=True)
        assert_all_same_bits(outputs, jitted_outputs)
        assert_all_same_bits(gradients, jitted_gradients)


@on_each_platform
@over_kinds
def test_grad_under_jit_equals_the_pulled_back_ones(op_name: str, case: Case, platform: str, here: OnPlatform) -> None:
    made = problem_of(op_name, case)
    problem = solve(made.op, case, made.inputs, {k: np.ones_like(v) for k, v in made.cotangents.items()})
    function = here.function(problem)
    inputs = here.arrays(problem.inputs)
    fixed = {name: array for name, array in inputs.items() if name not in problem.differentiable}

    def loss(wanted: dict[str, Any]) -> Any:
        return sum(output.astype(np.float32).sum() for output in function(wanted | fixed).values())

    gradients = here.jax.jit(here.jax.grad(loss))({name: inputs[name] for name in problem.differentiable})
    pulled = here.run(problem, jit=True)[1]
    # On the CPU XLA sees the ones and folds them: the truth is what both must meet.
    assert_gradients(problem, fetched(gradients), pulled)


# ---- vmap ----------------------------------------------------------------------------------------------------------


def members(op_name: str, case: Case, size: int) -> list[Problem]:
    """The same case on different numbers."""
    return [
        make_problem(OPS[op_name], dataclasses.replace(case, name=f"{case.name}, member {index}"))
        for index in range(size)
    ]


def vmapped_run(here: OnPlatform, problems: list[Problem], mapped: tuple[str, ...]) -> tuple[Arrays, Arrays]:
    """Outputs and gradients of a batch of problems by vmap; inputs not in `mapped` are the first problem's."""
    function = here.function(problems[0])
    inputs = here.arrays(
        {
            name: np.stack([problem.inputs[name] for problem in problems]) if name in mapped else array
            for name, array in problems[0].inputs.items()
        }
    )
    axes = {name: 0 if name in mapped else None for name in inputs}
    cotangents = here.arrays({k: np.stack([p.cotangents[k] for p in problems]) for k in problems[0].cotangents})
    wanted = problems[0].differentiable

    def outputs_and_gradients(inputs: dict[str, Any], cotangents: dict[str, Any]) -> Any:
        outputs, pull_back = here.jax.vjp(lambda some: function(inputs | some), {name: inputs[name] for name in wanted})
        return outputs, pull_back(cotangents)[0]

    call = here.jax.jit(here.jax.vmap(outputs_and_gradients, in_axes=(axes, 0)))
    outputs, gradients = call(inputs, cotangents)
    return fetched(outputs), fetched(gradients)


def vmap_cases(cases: list[Any]) -> list[Any]:
    """Cases, each with choices of mapped inputs: the first that has rows, all that have, and all there are."""
    params = []
    for param in cases:
        op_name, case = param.values
        specs, with_rows = OPS[op_name].inputs(case), OPS[op_name].row_inputs(case)
        rows = tuple(name for name in specs if name in with_rows)
        for mapped in dict.fromkeys((rows[:1], rows, tuple(specs))):
            params.append(pytest.param(op_name, case, mapped, id=f"{param.id}-{'-'.join(mapped)}"))
    return params


@over(vmap_cases(one_of_each_signature()), vmap_cases(each_kind(layouts=False)), "mapped")
def test_vmap_equals_a_loop(op_name: str, case: Case, mapped: tuple[str, ...], platform: str, here: OnPlatform) -> None:
    problems = members(op_name, case, 3)
    shared = {name: array for name, array in problems[0].inputs.items() if name not in mapped}
    problems = [solve(p.op, p.case, p.inputs | shared, p.cotangents) for p in problems]
    outputs, gradients = vmapped_run(here, problems, mapped)
    for index, problem in enumerate(problems):
        alone_outputs, alone_gradients = here.run(problem, jit=True)
        member_outputs = {name: array[index] for name, array in outputs.items()}
        member_gradients = {name: array[index] for name, array in gradients.items()}
        if platform == "gpu" and problem.op.same_bits:
            assert_all_same_bits(member_outputs, alone_outputs)
            assert_all_same_bits(member_gradients, alone_gradients)
        assert_outputs(problem, member_outputs, alone_outputs)
        assert_gradients(problem, member_gradients, alone_gradients)


@over(one_of_each_signature(), each_kind(layouts=False))
def test_vmap_of_the_outputs_alone(op_name: str, case: Case, platform: str, here: OnPlatform) -> None:
    problems = members(op_name, case, 2)
    stacked = {name: np.stack([p.inputs[name] for p in problems]) for name in problems[0].inputs}
    outputs = fetched(here.jax.vmap(here.function(problems[0]))(here.arrays(stacked)))
    for index, problem in enumerate(problems):
        assert_outputs(problem, {k: v[index] for k, v in outputs.items()}, here.forward(problem))


# ---- empty arrays, refusals, PyTorch -------------------------------------------------------------------------------


@on_each_platform
@pytest.mark.parametrize(("op_name", "case"), each_case(lambda case: 0 in case.shape))
def test_empty_arrays_give_empty_results_and_zero_sums(
    op_name: str, case: Case, platform: str, here: OnPlatform
) -> None:
    problem = problem_of(op_name, case)
    for jit in (False, True):
        outputs, gradients = here.run(problem, jit)
        assert {k: v.shape for k, v in outputs.items()} == {k: v.shape for k, v in problem.truth.items()}
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, np.zeros_like(problem.inputs[name]))


@on_each_platform
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("op_name", "bad"), each_bad_call())
def test_bad_calls_are_refused_in_the_words_torch_hears(
    op_name: str, bad: BadCall, jit: bool, platform: str, here: OnPlatform
) -> None:
    import fuselm.jax

    op = getattr(fuselm.jax, op_name)

    def call(inputs: dict[str, Any]) -> Any:
        return op(**inputs, **bad.options)

    arrays = here.arrays(make_arrays(bad.tensors, 0))
    with pytest.raises(RefusedInput) as caught:
        (here.jax.jit(call) if jit else call)(arrays)
    assert str(caught.value) == refusal(op_of(op_name), bad, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("platform", ["gpu"])
@pytest.mark.parametrize(("op_name", "case"), [p for p in each_case() if OPS[p.values[0]].same_bits])
def test_jax_and_torch_agree_to_the_bit_on_cuda(op_name: str, case: Case, platform: str, here: OnPlatform) -> None:
    problem = problem_of(op_name, case)
    contiguous = dataclasses.replace(problem, case=dataclasses.replace(case, layout="contiguous"))
    jax_outputs, jax_gradients = here.run(problem, jit=True)
    torch_outputs, torch_gradients = run(op_of(op_name), contiguous, "cuda")
    assert_all_same_bits(jax_outputs, all_numpy(torch_outputs))
    assert_all_same_bits(jax_gradients, all_numpy(torch_gradients))
