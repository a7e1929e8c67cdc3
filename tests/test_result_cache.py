"""Memory of large results: ordinary arrays, reused within a bound, given back when asked."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import groupnorm
from groupnorm import _core, result_cache

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def fresh_cache():
    limit = _core.result_cache_limit()
    _core.empty_result_cache()
    yield
    _core.set_result_cache_limit(limit)
    _core.empty_result_cache()


def result(megabytes=4):
    x = np.ones((1, 4, megabytes * MEGABYTE // 16), np.float32)
    return groupnorm.group_norm(x, 2)


def address(array):
    return array.__array_interface__["data"][0]


def test_the_memory_of_a_dead_result_is_used_again():
    y = result()
    where = address(y)
    assert _core.result_cache_held() == 0
    del y
    assert _core.result_cache_held() >= 4 * MEGABYTE
    y = result()
    assert address(y) == where
    assert _core.result_cache_held() == 0
    assert address(result()) != where, "the first one is still alive"


def test_other_sizes_get_other_memory():
    where = address(result(16))
    assert address(result(4)) != where
    small = groupnorm.group_norm(np.ones((1, 4, 100), np.float32), 2)
    assert _core.result_cache_held() >= 20 * MEGABYTE
    del small


def test_the_limit_holds():
    _core.set_result_cache_limit(10 * MEGABYTE)
    results = [result(4) for _ in range(5)]
    del results
    assert 4 * MEGABYTE <= _core.result_cache_held() <= 10 * MEGABYTE
    del_large = result(16)
    del del_large
    assert _core.result_cache_held() <= 10 * MEGABYTE
    _core.set_result_cache_limit(0)
    assert _core.result_cache_held() == 0
    y = result()
    del y
    assert _core.result_cache_held() == 0


def test_the_cache_can_be_emptied():
    y = result()
    del y
    assert "4 of at most" in str(groupnorm.info())
    groupnorm.empty_result_cache()
    assert _core.result_cache_held() == 0
    assert "0 of at most" in groupnorm.info().result_cache


def test_results_are_ordinary_arrays():
    y = result()
    assert y.flags.owndata
    assert y.flags.writeable
    assert y.flags.aligned
    assert address(y) % 64 == 0
    copy = pickle.loads(pickle.dumps(y))
    np.testing.assert_array_equal(copy, y)
    before = y[0, 0, :5].copy()
    y.resize((1, 4, MEGABYTE), refcheck=False)
    np.testing.assert_array_equal(y[0, 0, :5], before)
    y.resize((3,), refcheck=False)
    np.testing.assert_array_equal(y, before[:3])
    view = result()[0, 1:3]
    groupnorm.empty_result_cache()
    other = result()
    assert not np.shares_memory(view, other)
    assert np.isfinite(view).all()


def test_arrays_of_others_do_not_come_from_the_cache():
    y = result()
    where = address(y)
    del y
    others = [np.empty((1, 4, 4 * MEGABYTE // 16), np.float32) for _ in range(3)]
    assert where not in map(address, others)


def test_results_may_die_in_any_thread():
    with ThreadPoolExecutor(4) as pool:
        shapes = list(pool.map(lambda _: result(2).shape, range(64)))
    assert len(shapes) == 64
    assert _core.result_cache_held() <= _core.result_cache_limit()


@pytest.mark.parametrize(("text", "megabytes"), [("", 256), ("0", 0), (" 12 ", 12), ("256", 256)])
def test_limit_from_the_environment(monkeypatch, text, megabytes):
    monkeypatch.setenv(result_cache.VARIABLE, text)
    assert result_cache.limit_from_environment() == megabytes * MEGABYTE


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "99999999999", "1e3", "²"])
def test_a_wrong_limit_is_told(monkeypatch, text):
    monkeypatch.setenv(result_cache.VARIABLE, text)
    with pytest.raises(ValueError, match=r"GROUPNORM_RESULT_CACHE_MB must be a whole number"):
        result_cache.limit_from_environment()


EXTRA_MEMORY = """
import sys
import numpy as np
import groupnorm

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

def extra(call, *results):
    call()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

groupnorm.set_num_threads(2)
channels_last = sys.argv[1] == "last"
shape = (2, 64, 512, 256) if not channels_last else (2, 512, 256, 64)
axis = -1 if channels_last else 1
x = np.random.default_rng(0).standard_normal(shape, np.float32)
weight = np.ones(64, np.float32)
out = np.empty_like(x)
options = {"activation": "silu", "channel_axis": axis}
_, mean, rstd = groupnorm.group_norm(x, 8, weight, weight, return_stats=True, **options)
print(extra(lambda: groupnorm.group_norm(x, 8, weight, weight, out=out, **options)))
print(extra(lambda: groupnorm.group_norm_backward(x, x, mean, rstd, 8, weight, weight, **options)))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
@pytest.mark.parametrize("layout", ["first", "last"])
def test_memory_beyond_inputs_and_outputs(layout):
    """By the peak of the resident set: a megabyte for each of two threads, and what is O(N·C)."""
    finished = subprocess.run(
        [sys.executable, "-c", EXTRA_MEMORY, layout], capture_output=True, text=True, check=True
    )
    forward, backward = map(int, finished.stdout.split())
    # The results of the second call lie where those of the first did: 67 MB stay out of the count.
    slack = MEGABYTE // 2
    assert forward <= slack
    assert backward <= 2 * MEGABYTE + slack
