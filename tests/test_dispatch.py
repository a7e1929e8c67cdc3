"""Which code runs: instruction sets, backends, threads, forks, and what an import brings in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import groupnorm
from conftest import RUNNABLE_ISAS
from groupnorm import _core, backends
from groupnorm.testing import check_backward, check_forward, make_inputs


def run_python(code, **environment):
    """Run code in a fresh interpreter; returns (exit code, stdout, stderr)."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


COUNT_CALLS = """
    import json, ml_dtypes, numpy as np, groupnorm
    from groupnorm import _core
    x = np.random.default_rng(0).standard_normal((2, 6, 50)).astype(ml_dtypes.bfloat16)
    y, mean, rstd = groupnorm.group_norm(x, 3, return_stats=True)
    groupnorm.group_norm_backward(x, x, mean, rstd, 3)
    print(json.dumps([groupnorm.info().isa, {n: c for n, _, c in _core.isa_list()}]))
"""


@pytest.mark.parametrize("forced", RUNNABLE_ISAS)
def test_forced_isa_really_runs(forced):
    """Each instruction set counts its own kernels, in its own object file; all have bfloat16's."""
    code, out, err = run_python(COUNT_CALLS, GROUPNORM_ISA=forced)
    assert code == 0, err
    selected, calls = json.loads(out)
    assert selected == forced
    assert calls.pop(forced) > 0
    assert not any(calls.values()), calls


def test_best_isa_is_the_default():
    code, out, err = run_python(COUNT_CALLS, GROUPNORM_ISA="")
    assert code == 0, err
    assert json.loads(out)[0] == RUNNABLE_ISAS[0]


@pytest.mark.parametrize(
    "name", ["sse9", *(n for n, why_not, _ in _core.isa_list() if why_not is not None)]
)
def test_forced_isa_that_cannot_run_is_an_error(name):
    code, _, err = run_python(COUNT_CALLS, GROUPNORM_ISA=name)
    assert code == 1
    assert "ValueError" in err
    assert f"GROUPNORM_ISA={name}" in err
    assert "use one of: " in err
    code, out, err = run_python("import groupnorm; print(groupnorm.info())", GROUPNORM_ISA=name)
    assert code == 0, err
    assert f"problem: GROUPNORM_ISA={name}" in out


def test_reference_backend_serves_the_whole_interface():
    code, out, err = run_python(
        """
        import numpy as np, groupnorm
        from groupnorm import _core
        x = np.random.default_rng(0).standard_normal((2, 6, 50)).astype(np.float16)
        w, s = np.ones(6, np.float32), np.ones((2, 6), np.float64)
        out = np.empty_like(x)
        r = groupnorm.group_norm(x, 3, w, scale=s, residual=x, return_stats=True, out=out)
        assert r.y is out and r.y.dtype == np.float16 and r.mean.dtype == np.float32
        g = groupnorm.group_norm_backward(x, r.residual, r.mean, r.rstd, 3, w, scale=s)
        assert g.dx.dtype == np.float16 and g.dweight.dtype == np.float32 and g.dbias is None
        assert groupnorm.group_stats(x, 3).mean.shape == (2, 3)
        assert not sum(count for _, _, count in _core.isa_list())
        print(groupnorm.info().backend)
        """,
        GROUPNORM_BACKEND="reference",
    )
    assert code == 0, err
    assert out.strip() == "reference"


def test_unknown_backend_is_an_error():
    code, _, err = run_python(COUNT_CALLS, GROUPNORM_BACKEND="abacus")
    assert code == 1
    assert "GROUPNORM_BACKEND=abacus names no backend; use one of: triton, cpu, reference" in err


def test_backends_are_ordered_and_explain_themselves():
    assert [backend.name for backend in backends.BACKENDS] == ["triton", "cpu", "reference"]
    assert backends.select().name == "cpu"
    gpu, *others = backends.BACKENDS
    assert gpu.why_not(None) == (
        "NumPy arrays are not on a GPU; torch tensors on one run on these kernels"
    )
    assert all(backend.why_not(None) is None for backend in others)


def test_forced_triton_without_a_gpu_is_an_error():
    """Neither a GPU nor the interpreter: the reason says what is missing and what to do."""
    code, _, err = run_python(COUNT_CALLS, GROUPNORM_BACKEND="triton", TRITON_INTERPRET="0")
    assert code == 1
    assert "ValueError: GROUPNORM_BACKEND=triton cannot run this problem: " in err
    assert "is not installed; install it" in err or "torch sees no GPU; set TRITON_" in err


def test_info():
    info = groupnorm.info()
    text = str(info)
    assert info.isa in RUNNABLE_ISAS
    assert info.threads == groupnorm.get_num_threads()
    for name, why_not, _ in _core.isa_list():
        assert name in text
        assert why_not is None or why_not in text
    assert not info.problems
    assert info.version == groupnorm.__version__


FRAMEWORKS = ("torch", "jax", "jaxlib", "triton", "tensorflow", "onnx", "rich", "typer", "scipy")


def imported_frameworks(code):
    code, out, err = run_python(
        f"{code}\nimport json, sys\nprint(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    assert code == 0, err
    return sorted(set(json.loads(out)) & set(FRAMEWORKS))


def test_import_brings_no_framework():
    assert imported_frameworks("import groupnorm; groupnorm.info()") == []


def test_the_import_check_can_fail():
    assert imported_frameworks("import groupnorm, onnx") == ["onnx"]


FORK = """
    import os, sys, numpy as np, groupnorm
    groupnorm.set_num_threads(4)
    x = np.random.default_rng(0).standard_normal((4, 64, 64, 64)).astype(np.float32)
    expected = groupnorm.group_norm(x, 32)
    child = os.fork()
    if child == 0:
        same = np.array_equal(groupnorm.group_norm(x, 32), expected)
        os._exit(0 if same and groupnorm.get_num_threads() == 1 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    again = np.array_equal(groupnorm.group_norm(x, 32), expected)
    sys.exit(0 if status == 0 and again and groupnorm.get_num_threads() == 4 else 1)
"""


def test_a_forked_child_works():
    """The parent has used the thread pool: in the child its threads are gone."""
    code, out, err = run_python(FORK)
    assert code == 0, out + err


def test_threads_can_be_set(restored_threads):
    groupnorm.set_num_threads(3)
    assert groupnorm.get_num_threads() == 3


def test_thread_count_follows_the_environment():
    code, out, err = run_python(
        "import groupnorm; print(groupnorm.get_num_threads())", OMP_NUM_THREADS="1"
    )
    assert code == 0, err
    assert out.strip() == "1"


def test_calls_from_many_python_threads():
    """The GIL is released: concurrent calls must not disturb each other."""
    inputs = [make_inputs((2, 32, 40, 40), 8, seed=seed, activation="silu") for seed in range(4)]
    failures = []

    def work(problem):
        try:
            for _ in range(5):
                arguments = (8, problem.weight, problem.bias)
                y, mean, rstd = groupnorm.group_norm(
                    problem.x, *arguments, return_stats=True, **problem.options
                )
                check_forward(problem, y, mean, rstd, max_groups=1)
                grads = groupnorm.group_norm_backward(
                    problem.dy, problem.x, mean, rstd, *arguments, **problem.options
                )
                check_backward(problem, mean, rstd, grads, max_groups=1)
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(problem,)) for problem in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_gil_is_released():
    """While one thread is in the core, another one runs Python."""
    x = np.zeros((1, 32, 512, 512), np.float32)
    ticks = 0
    done = threading.Event()

    def work():
        for _ in range(10):
            groupnorm.group_norm(x, 32, activation="gelu", out=x)
        done.set()

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    # With so long an interval a thread that keeps the GIL would not hand it over by itself.
    sys.setswitchinterval(60.0)
    try:
        thread.start()
        while not done.is_set():
            ticks += 1
            done.wait(0.001)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert ticks > 3
