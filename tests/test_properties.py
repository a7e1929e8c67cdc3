"""What must hold for every problem, over shapes and values that hypothesis draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import groupnorm
from groupnorm.arguments import FLOAT_DTYPES
from groupnorm.testing import check_backward, check_forward, make_inputs, run

settings.register_profile(
    "groupnorm",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("groupnorm")

activations = st.sampled_from([None, "silu", "relu", "gelu", "gelu_tanh", ("swish", -0.7)])


@st.composite
def problems(draw, dtypes=FLOAT_DTYPES, equal_groups=False):
    """Inputs of a small problem, any rank and layout."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    if equal_groups:
        sizes = [sizes[0]] * len(sizes)
    spatial = draw(st.lists(st.integers(1, 9), max_size=3))
    samples = draw(st.integers(1, 4))
    channel_axis = draw(st.sampled_from([1, -1]))
    channels = sum(sizes)
    shape = (samples, channels, *spatial) if channel_axis == 1 else (samples, *spatial, channels)
    return make_inputs(
        shape,
        tuple(sizes),
        draw(st.sampled_from(dtypes)),
        param_dtype=draw(st.sampled_from(FLOAT_DTYPES)),
        activation=draw(activations),
        adaptive=draw(st.booleans()),
        affine=draw(st.booleans()),
        offset=draw(st.sampled_from([0.0, -3.0, 40.0])),
        channel_axis=channel_axis,
        seed=draw(st.integers(0, 2**16)),
    )


def forward(inputs, x=None, **changed):
    options = {**inputs.options, **changed}
    x = inputs.x if x is None else x
    return groupnorm.group_norm(
        x, inputs.num_groups, inputs.weight, inputs.bias, return_stats=True, **options
    )


@given(problems())
def test_reference_agrees(inputs):
    result, gradients = run(inputs)
    check_forward(inputs, *result)
    check_backward(inputs, result.mean, result.rstd, gradients)


@given(problems([np.dtype(np.float64)]), st.floats(-1e3, 1e3), st.floats(0.01, 100))
def test_shift_and_scale_invariance(inputs, shift, factor):
    """group_norm(a·x + b) = group_norm(x) once eps is scaled by a²."""
    arguments = (inputs.num_groups, inputs.weight, inputs.bias)
    plain = groupnorm.group_norm(inputs.x, *arguments, eps=1e-3, **inputs.options)
    moved = groupnorm.group_norm(
        inputs.x * factor + shift, *arguments, eps=1e-3 * factor**2, **inputs.options
    )
    np.testing.assert_allclose(moved, plain, atol=1e-8, rtol=1e-8)


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_samples_permutes_results(inputs, random):
    order = list(range(inputs.x.shape[0]))
    random.shuffle(order)
    options = {
        name: inputs.options[name][order] for name in ("scale", "shift") if name in inputs.options
    }
    y, mean, rstd = forward(inputs)
    permuted = forward(inputs, inputs.x[order], **options)
    for whole, part in zip((y, mean, rstd), permuted, strict=True):
        assert whole[order].tobytes() == np.ascontiguousarray(part).tobytes()


@given(problems(equal_groups=True), st.randoms(use_true_random=False))
def test_permuting_groups_permutes_results(inputs, random):
    axis, sizes = inputs.options["channel_axis"], inputs.num_groups
    groups = list(range(len(sizes)))
    random.shuffle(groups)
    channels = [g * sizes[0] + i for g in groups for i in range(sizes[0])]
    y, mean, rstd = forward(inputs)
    options = {
        name: inputs.options[name][:, channels]
        for name in ("scale", "shift")
        if name in inputs.options
    }
    arguments = (None if a is None else a[channels] for a in (inputs.weight, inputs.bias))
    moved = groupnorm.group_norm(
        np.take(inputs.x, channels, axis=axis),
        sizes,
        *arguments,
        return_stats=True,
        **{**inputs.options, **options},
    )
    np.testing.assert_array_equal(moved.y, np.take(y, channels, axis=axis))
    np.testing.assert_array_equal(moved.mean, mean[:, groups])
    np.testing.assert_array_equal(moved.rstd, rstd[:, groups])


@given(problems([np.dtype(np.float64)]))
def test_one_group_is_layer_norm(inputs):
    y = groupnorm.group_norm(inputs.x, 1, channel_axis=inputs.options["channel_axis"])
    axes = tuple(range(1, inputs.x.ndim))
    centred = inputs.x - inputs.x.mean(axis=axes, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, expected, atol=1e-9)


@given(problems([np.dtype(np.float64)]))
def test_a_group_per_channel_is_instance_norm(inputs):
    axis = inputs.options["channel_axis"]
    y = groupnorm.group_norm(inputs.x, inputs.x.shape[axis], channel_axis=axis)
    axes = tuple(i for i in range(1, inputs.x.ndim) if i != axis % inputs.x.ndim)
    centred = inputs.x - inputs.x.mean(axis=axes, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, expected, atol=1e-9)


@given(problems(), st.integers(0, 1000))
def test_split_statistics_merge_into_the_whole(inputs, where):
    axis = inputs.options["channel_axis"]
    planes = np.moveaxis(inputs.x, axis, 1).reshape(*np.moveaxis(inputs.x, axis, 1).shape[:2], -1)
    cut = where % (planes.shape[2] + 1)
    whole = groupnorm.group_stats(planes, inputs.num_groups)
    left, right = (
        groupnorm.group_stats(p, inputs.num_groups) for p in (planes[..., :cut], planes[..., cut:])
    )
    merged = left + right
    np.testing.assert_array_equal(merged.count, whole.count)
    # float32 sums a few terms in float first; see tolerance.py.
    rounding = 16 * 2.0**-24 if inputs.x.dtype == np.float32 else 1e-12
    deviation = np.sqrt(whole.m2 / np.maximum(1, whole.count))
    assert (
        np.abs(merged.mean - whole.mean) <= 1e-12 * (1 + np.abs(whole.mean)) + rounding * deviation
    ).all()
    np.testing.assert_allclose(merged.m2, whole.m2, rtol=max(1e-9, 2 * rounding), atol=1e-9)


@given(problems([np.dtype(np.float64)]))
def test_gradient_sums_that_must_vanish(inputs):
    """Without eps, y does not change when a group is shifted or scaled: Σ dx = Σ dx·x̂ = 0."""
    axis = inputs.options["channel_axis"]
    (_, mean, rstd), gradients = run(replace(inputs, eps=0.0))
    dx, x = (np.moveaxis(a, axis, 1) for a in (gradients.dx, inputs.x))
    ends = np.cumsum(inputs.num_groups)
    for k, (end, size) in enumerate(zip(ends, inputs.num_groups, strict=True)):
        channels = slice(end - size, end)
        group, values = (a[:, channels].reshape(len(a), -1) for a in (dx, x))
        if group.shape[1] == 1:
            continue  # no variance, no scale
        xhat = (values - mean[:, k : k + 1]) * rstd[:, k : k + 1]
        rounding = 1e-11 * rstd[:, k] * group.shape[1]
        assert (np.abs(group.sum(axis=1)) <= rounding).all()
        assert (np.abs((group * xhat).sum(axis=1)) <= rounding).all()
