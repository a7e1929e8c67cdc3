from __future__ import annotations

import io
import json
import math

import pytest

pytest.importorskip("rich")

import torch
from rich.console import Console

from groupnorm.bench import networks, training


def test_a_short_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "QUICK", ("4x32x8x8",))
    path = tmp_path / "rows.jsonl"
    code = training.main(["--budget", "0.2", "--threads", "1", "--save", str(path)])
    assert code == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["contender"] for row in rows} == {"groupnorm.torch", "torch"}
    assert len(rows) == 2 * 4 * 2 * 2
    assert "geometric mean" in capsys.readouterr().out


def test_every_case_is_one_that_torch_trains_on():
    cases = list(training._trained_cases())
    assert len(cases) == len(list(training.measured_cases())) - 2
    for case in cases:
        x = torch.empty(case.shape, device="meta")
        torch.nn.functional.group_norm(x, case.groups)


def test_wrong_results_are_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(training, "QUICK", ("4x32x8x8",))
    plain = training.ours.group_norm
    monkeypatch.setattr(training.ours, "group_norm", lambda *a, **k: plain(*a, **k) * 1.1)
    arguments = ["--budget", "0.1", "--work", "step", "--dtype", "float32", "--layout", "last"]
    assert training.main(arguments) == 1
    assert "off by" in capsys.readouterr().out


def test_a_training_step_keeps_one_tensor_less():
    tensors = training.peak_memory()
    assert tensors["groupnorm.torch"] <= tensors["torch"] - 0.9


def small_network(train):
    module = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Flatten()
    )
    return networks.Network("small", module, (torch.randn(2, 4, 6, 6),), train)


@pytest.fixture
def small_networks(monkeypatch):
    makers = {str(train): lambda train=train: small_network(train) for train in (False, True)}
    monkeypatch.setattr(networks, "NETWORKS", makers)
    monkeypatch.setattr(networks, "peak_megabytes", lambda *_: 12.0)


def test_networks_are_compared_and_timed(small_networks):
    console = Console(width=150, file=io.StringIO(), record=True)
    assert networks.print_networks(console, 1)
    text = console.export_text()
    assert text.count("small") == 4
    assert text.count("12") >= 8


def test_a_wrong_network_is_not_timed(small_networks, monkeypatch):
    monkeypatch.setattr(networks, "difference", lambda *_: 0.1)
    console = Console(width=150, file=io.StringIO(), record=True)
    assert not networks.print_networks(console, 1)
    assert console.export_text().count("off by 0.1") == 4


@pytest.mark.parametrize("train", [False, True])
def test_the_fused_network_gives_the_same(train):
    calls = small_network(train).calls("last")
    with torch.profiler.profile() as profiler:
        fused = calls[networks.OURS]()
    assert any("groupnorm::" in event.key for event in profiler.key_averages())
    assert networks.difference(fused, calls[networks.EAGER]()) < 1e-5


@pytest.mark.parametrize(("factor", "least"), [(1.01, 5e-3), (math.nan, math.inf)])
@pytest.mark.parametrize("place", [0, 1])
def test_what_differs_is_found(factor, least, place):
    wanted = [torch.randn(5), torch.randn(7)]
    got = [tensor.clone() for tensor in wanted]
    assert networks.difference(got, wanted) == 0
    got[place] *= factor
    assert networks.difference(got, wanted) >= least
