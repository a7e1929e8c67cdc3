"""The conformance kit: it passes what is right, and finds what is known to be wrong."""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest

from groupnorm import cli, reference
from groupnorm.testing import PROPERTIES, Asked, examine, examine_apart, from_function
from groupnorm.testing import conformance as kit
from groupnorm.testing.accuracy import cases
from groupnorm.testing.findings import FAILS, HOLDS, NOT_ASKED
from groupnorm.testing.implementation import load_function
from groupnorm.testing.implementations import known
from groupnorm.testing.properties import Property

OURS = [
    name
    for name, entry in known().items()
    if entry.ours and entry.why_not() is None and entry.packages == ("groupnorm",)
]


def grouped(x, num_groups):
    return x.reshape(x.shape[0], num_groups, -1)


def per_channel(parameter, x):
    return parameter.reshape(1, -1, *[1] * (x.ndim - 2))


def right(x, num_groups, weight, bias, eps):
    if x.ndim < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError("x must have samples and channels, num_groups must divide these")
    return reference.group_norm(x, num_groups, weight, bias, eps=eps).y.astype(x.dtype)


def right_backward(dy, x, num_groups, weight, bias, eps):
    forward = reference.group_norm(x, num_groups, eps=eps)
    grads = reference.group_norm_backward(
        dy, x, forward.mean, forward.rstd, num_groups, weight, bias
    )
    return tuple(g.astype(x.dtype) for g in grads[:3])


def with_statistics(statistics):
    """A float64 forward that is right but for its variance or eps."""

    def forward(x, num_groups, weight, bias, eps):
        right(x, num_groups, weight, bias, eps)
        slabs = grouped(x.astype(np.float64), num_groups)
        mean, rstd = statistics(slabs, x.dtype, eps)
        xhat = ((slabs - mean) * rstd).reshape(x.shape)
        return (per_channel(weight, x) * xhat + per_channel(bias, x)).astype(x.dtype)

    return forward


def unbiased(slabs, dtype, eps):
    return slabs.mean(2, keepdims=True), 1 / np.sqrt(slabs.var(2, keepdims=True, ddof=1) + eps)


def without_eps(slabs, dtype, eps):
    return slabs.mean(2, keepdims=True), 1 / np.sqrt(slabs.var(2, keepdims=True))


def squares_less_squared_mean(slabs, dtype, eps):
    # As it is done: sums in float32 for the narrow types, whatever x is.
    work = np.float64 if dtype == np.float64 else np.float32
    x = slabs.astype(work)
    mean = x.mean(2, keepdims=True)
    variance = np.square(x).mean(2, keepdims=True) - np.square(mean)
    return mean.astype(np.float64), 1 / np.sqrt(variance.astype(np.float64) + eps)


def weight_out_of_the_sums(dy, x, num_groups, weight, bias, eps):
    """The published formula: γ before the bracket, batch sums dγ and dβ inside it."""
    forward = reference.group_norm(x, num_groups, eps=eps)
    groups = reference.groups_of(num_groups, x.shape[1])
    planes, dys = reference.to_planes(x, 1), reference.to_planes(dy, 1)
    r = reference.per_channel(forward.rstd, groups)
    xhat = (planes - reference.per_channel(forward.mean, groups)) * r
    dbias, dweight = dys.sum((0, 2)), (dys * xhat).sum((0, 2))
    size = [planes.shape[2] * (g.stop - g.start) for g in groups]
    p = np.array([dbias[g].sum() / n for g, n in zip(groups, size, strict=True)])
    q = np.array([dweight[g].sum() / n for g, n in zip(groups, size, strict=True)])
    inside = (
        dys - reference.per_channel(p[None], groups) - xhat * reference.per_channel(q[None], groups)
    )
    dx = (weight.astype(np.float64)[None, :, None] * r * inside).reshape(x.shape)
    return tuple(g.astype(x.dtype) for g in (dx, dweight, dbias))


def verdicts(implementation):
    return {finding.property: finding.verdict for finding in examine(implementation).findings}


@pytest.mark.parametrize("name", OURS)
def test_ours_keep_every_property(name):
    result = examine_apart(Asked(name))
    assert [f for f in result.findings if f.verdict == FAILS] == []
    assert result.holds
    assert len(result.findings) == len(PROPERTIES)
    assert {e.layout for e in result.mean_errors} == {"first", "last"}
    assert max(e.error for e in result.mean_errors) < 4e-6


def test_a_right_function_keeps_every_property():
    result = examine(from_function(right, right_backward))
    assert [f for f in result.findings if f.verdict == FAILS] == []
    asked = {f.property for f in result.findings if f.verdict == NOT_ASKED}
    assert asked == {"activations", "threads"}


@pytest.mark.parametrize(
    ("function", "backward", "found"),
    [
        (right, weight_out_of_the_sums, {"backward float32", "backward float64"}),
        (with_statistics(squares_less_squared_mean), None, {"mean, forward", "tiny variance"}),
        (with_statistics(unbiased), None, {"forward float32", "forward bfloat16"}),
        (with_statistics(without_eps), None, {"constants", "tiny variance"}),
    ],
    ids=["weight out of the sums", "E[x²]−E[x]²", "unbiased variance", "without eps"],
)
def test_what_is_published_and_wrong_is_found(function, backward, found):
    got = verdicts(from_function(function, backward))
    assert found <= {name for name, verdict in got.items() if verdict == FAILS}
    # Found by what is wrong with it, and not by everything at once.
    assert got["views"] == got["own memory"] == got["bad input"] == HOLDS
    # Sums over the batch carry a NaN to other samples.
    assert (got["NaN stays"] == FAILS) is (backward is weight_out_of_the_sums)


def test_a_forward_alone_is_not_asked_for_gradients():
    got = verdicts(from_function(right))
    assert {got[name] for name in got if "backward" in name} == {NOT_ASKED}
    assert got["forward float32"] == HOLDS


def only_the_element(x, num_groups, weight, bias, eps):
    clean = right(np.nan_to_num(x, nan=0.0, posinf=0.0), num_groups, weight, bias, eps)
    return np.where(np.isfinite(x), clean, x)


def changes_x(x, num_groups, weight, bias, eps):
    y = right(x, num_groups, weight, bias, eps)
    x *= 0
    return y


def writes_into_x(x, num_groups, weight, bias, eps):
    x[...] = right(x, num_groups, weight, bias, eps)
    return x


class ReusedBuffer:
    def __init__(self):
        self.kept = {}

    def __call__(self, x, num_groups, weight, bias, eps):
        out = self.kept.setdefault((x.shape, x.dtype), np.empty_like(x))
        out[...] = right(x, num_groups, weight, bias, eps)
        return out


class Noisy:
    def __init__(self):
        self.calls = 0

    def __call__(self, x, num_groups, weight, bias, eps):
        self.calls += 1
        y = right(x, num_groups, weight, bias, eps)
        return (
            np.nextafter(y, y.dtype.type(0)) if self.calls % 3 == 1 and y.dtype == np.float32 else y
        )


def truncates(x, num_groups, weight, bias, eps):
    y = right(x, num_groups, weight, bias, eps)
    if y.dtype != np.float16:
        return y
    exact = right(x.astype(np.float64), num_groups, weight, bias, eps)
    return np.where(np.abs(y) > np.abs(exact), np.nextafter(y, np.float16(0)), y)


def clamps_eps(x, num_groups, weight, bias, eps):
    return right(x, num_groups, weight, bias, max(eps, 1e-6))


def clips(x, num_groups, weight, bias, eps):
    return np.clip(right(x, num_groups, weight, bias, eps), -50, 50)


def only_dense(x, num_groups, weight, bias, eps):
    y = right(x, num_groups, weight, bias, eps)
    return y if x.flags.c_contiguous else np.zeros_like(y)


def zeros_for_constants(x, num_groups, weight, bias, eps):
    y = right(x, num_groups, weight, bias, eps)
    if not x.size:
        return y
    flat = grouped(x, num_groups).astype(np.float64)
    lost = np.repeat(np.ptp(flat, axis=2) == 0, x.shape[1] // num_groups, axis=1)
    y[lost] = 0
    return y


def leaks(x, num_groups, weight, bias, eps):
    y = right(x, num_groups, weight, bias, eps)
    return np.where(np.isfinite(x).all(), y, np.nan).astype(x.dtype)


def takes_anything(x, num_groups, weight, bias, eps):
    return right(x, num_groups, weight, bias, eps) if x.ndim > 1 and num_groups else x


def depends_on_the_batch(x, num_groups, weight, bias, eps):
    y = right(x, num_groups, weight, bias, eps)
    return np.nextafter(y, y.dtype.type(0)) if len(x) > 1 and x.dtype == np.float32 else y


def raises_for_empty(x, num_groups, weight, bias, eps):
    if x.size == 0:
        raise RuntimeError("no elements\nand more")
    return right(x, num_groups, weight, bias, eps)


def swallows_nan(x, num_groups, weight, bias, eps):
    return np.nan_to_num(right(x, num_groups, weight, bias, eps))


@pytest.mark.parametrize(
    ("function", "name", "detail"),
    [
        (leaks, "NaN stays", "of another group changed it"),
        (swallows_nan, "NaN stays", "y, channels first: finite"),
        (only_the_element, "NaN stays", "y, channels first: finite"),
        (changes_x, "own memory", "x is changed"),
        (writes_into_x, "own memory", "x is changed"),
        (lambda x, *rest: right(x, *rest) if x.size != 2376 else x, "own memory", "shares"),
        (ReusedBuffer(), "repeatable", "a later call overwrote it"),
        (Noisy(), "repeatable", "other bits the second time"),
        (truncates, "forward float16", "equal float64 rounded once"),
        (clamps_eps, "eps", "y, channels first"),
        (clips, "large parameters", "y, channels first"),
        (only_dense, "views", "every second row"),
        (zeros_for_constants, "constants", "y, channels first"),
        (takes_anything, "bad input", "is accepted"),
        (depends_on_the_batch, "batch", "y of"),
        (raises_for_empty, "empty", "RuntimeError: no elements"),
        (lambda *a: right(*a).astype(np.float64), "forward float32", "float64 instead of float32"),
        (lambda *a: right(*a)[..., :1], "forward float32", "has shape"),
        (lambda *a: None, "forward float32", "must be a NumPy array"),
    ],
)
def test_each_property_can_fail(function, name, detail):
    (entry,) = [p for p in PROPERTIES if p.name == name]
    with pytest.raises(AssertionError, match=detail):
        entry.check(from_function(function))
    entry.check(from_function(right))


def forgets_samples(dy, x, num_groups, weight, bias, eps):
    dx, _, dbias = right_backward(dy, x, num_groups, weight, bias, eps)
    some = right_backward(dy[:64], x[:64], num_groups, weight, bias, eps)
    return dx, some[1], dbias


def dx_leaks_nan(dy, x, num_groups, weight, bias, eps):
    dx, dweight, dbias = right_backward(dy, x, num_groups, weight, bias, eps)
    return (dx if np.isfinite(x).all() else np.full_like(dx, np.nan)), dweight, dbias


def any_dy(dy, x, num_groups, weight, bias, eps):
    return right_backward(np.resize(dy, x.shape), x, num_groups, weight, bias, eps)


def empty_dx(dy, x, num_groups, weight, bias, eps):
    dx, dweight, dbias = right_backward(dy, x, num_groups, weight, bias, eps)
    return (dx if dx.size else dx.reshape(0)), dweight, dbias


@pytest.mark.parametrize(
    ("backward", "name", "detail"),
    [
        (forgets_samples, "long sums", "dweight of"),
        (dx_leaks_nan, "NaN stays", "dx, channels first"),
        (any_dy, "bad input", "dy of another shape"),
        (empty_dx, "empty", "dx of shape"),
    ],
)
def test_each_property_of_the_backward_can_fail(backward, name, detail):
    (entry,) = [p for p in PROPERTIES if p.name == name]
    with pytest.raises(AssertionError, match=detail):
        entry.check(from_function(right, backward))
    entry.check(from_function(right, right_backward))


def test_an_implementation_has_only_the_dtypes_it_says():
    def only_float32(x, *rest):
        assert x.dtype == np.float32
        return right(x, *rest)

    result = examine(from_function(only_float32, dtypes=("float32",)))
    assert result.holds
    by_name = {f.property: f.verdict for f in result.findings}
    assert by_name["forward float64"] == by_name["forward bfloat16"] == NOT_ASKED
    with pytest.raises(ValueError, match="dtypes must be of"):
        from_function(right, dtypes=("int8",))


def test_cases_are_cut_but_not_to_one_sample():
    chosen = list(cases(from_function(right)))
    assert len(chosen) > 30
    assert max(case.elements for case in chosen) < 50_000
    assert sum(case.shape[0] > 1 for case in chosen) > 20
    assert {case.suite for case in chosen} > {"ck", "vae", "vision", "video", "ascend", "caffe2"}


def write_module(folder, text):
    path = folder / "theirs.py"
    path.write_text("import os, signal\nimport numpy as np\n" + textwrap.dedent(text))
    return path


def test_a_process_that_dies_is_reported(tmp_path):
    path = write_module(
        tmp_path,
        """
        def crash(x, num_groups, weight, bias, eps):
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
    )
    result = examine_apart(Asked(f"{path}:crash"))
    assert not result.holds
    assert result.ended.startswith("killed by SIGSEGV in 'forward float32'")


def test_what_hangs_is_ended(tmp_path):
    path = write_module(
        tmp_path,
        """
        import time
        def sleeps(x, num_groups, weight, bias, eps):
            time.sleep(1000)
        """,
    )
    result = examine_apart(Asked(f"{path}:sleeps"), seconds=3)
    assert "took longer than 3 seconds in 'forward float32'" in result.ended


def test_what_an_implementation_prints_does_not_disturb(tmp_path):
    path = write_module(
        tmp_path,
        """
        from groupnorm import reference
        def loud(x, num_groups, weight, bias, eps):
            print("here I am" * 10000, flush=True)
            if x.ndim < 2 or num_groups < 1: raise ValueError
            return reference.group_norm(x, num_groups, weight, bias, eps=eps).y.astype(x.dtype)
        """,
    )
    assert examine_apart(Asked(f"{path}:loud")).holds


def test_the_environment_cannot_put_another_backend_in_its_place(monkeypatch):
    monkeypatch.setenv("GROUPNORM_BACKEND", "reference")
    result = examine_apart(Asked("groupnorm:portable"))
    figures = {f.property: f.figure for f in result.findings}
    # The reference is off by a rounding only.
    assert float(figures["forward float32"]) > 0.6


def test_an_interpreter_that_ends_early_is_reported(monkeypatch):
    monkeypatch.setattr(kit.sys, "executable", "/bin/false")
    result = examine_apart(Asked("groupnorm:reference"))
    assert result.ended == "ended with exit code 1 while loading"
    assert not result.holds


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing", "must be module:function"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("math:no_such_function", "AttributeError"),
        ("math:pi", "must be a function"),
        ("no_such_file.py:f", "no file"),
    ],
)
def test_what_cannot_be_loaded_says_why(path, reason):
    with pytest.raises(ValueError, match=reason):
        load_function(path)


def test_verify_finds_a_wrong_function(tmp_path, capsys):
    path = write_module(
        tmp_path,
        """
        def unbiased(x, num_groups, weight, bias, eps):
            slabs = x.astype(np.float64).reshape(len(x), num_groups, -1)
            mean, variance = slabs.mean(2, keepdims=True), slabs.var(2, keepdims=True, ddof=1)
            shape = (1, -1) + (1,) * (x.ndim - 2)
            xhat = ((slabs - mean) / np.sqrt(variance + eps)).reshape(x.shape)
            return (weight.reshape(shape) * xhat + bias.reshape(shape)).astype(x.dtype)
        """,
    )
    assert cli.main(["verify", "--impl", f"{path}:unbiased"]) == 1
    shown = capsys.readouterr().out
    assert "forward float32: " in shown
    assert "expected" in shown
    assert cli.main(["verify", "--impl", f"{path}:unbiased", "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert result["holds"] is False
    by_name = {finding["property"]: finding for finding in result["findings"]}
    assert by_name["forward float32"]["verdict"] == FAILS
    assert by_name["NaN stays"]["verdict"] == HOLDS


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--impl", "nosuch"], "nosuch"),
        (["--impl", "no_such_module:f"], "no_such_module"),
        (["--impl", "torch", "--backward", "math:sin"], "--backward"),
        (["--arrays", "lists"], "lists"),
        (["--impl", "groupnorm:nosuch:x"], "nosuch"),
    ],
)
def test_bad_usage_of_verify(arguments, named, capsys):
    assert cli.main(["verify", *arguments]) == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.err.count("\n") == 1


def test_verify_lists_what_it_knows(capsys):
    assert cli.main(["verify", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "groupnorm:portable\n" in shown
    assert "torch.compile" in shown


def test_a_property_has_a_meaning_and_a_name_of_its_own():
    assert len({entry.name for entry in PROPERTIES}) == len(PROPERTIES)
    assert all(isinstance(entry, Property) and entry.meaning for entry in PROPERTIES)


def test_torch_functions_get_their_gradients_from_autograd():
    torch = pytest.importorskip("torch")

    def theirs(x, num_groups, weight, bias, eps):
        return torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)

    implementation = from_function(theirs, arrays="torch")
    by_name = {entry.name: entry for entry in PROPERTIES}
    assert by_name["mean, backward"].of(implementation).verdict == FAILS
    assert by_name["eps"].of(implementation).verdict == HOLDS
    assert by_name["empty"].of(implementation).verdict == FAILS


def test_torch_frontend_keeps_every_property():
    pytest.importorskip("torch")
    result = examine_apart(Asked("groupnorm.torch"))
    assert [f for f in result.findings if f.verdict == FAILS] == []
    assert result.holds
