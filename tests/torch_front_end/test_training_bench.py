from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")

from groupnorm.bench import training


def test_a_short_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "QUICK", ("4x32x8x8",))
    path = tmp_path / "rows.jsonl"
    code = training.main(["--budget", "0.2", "--threads", "1", "--save", str(path)])
    assert code == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["contender"] for row in rows} == {"groupnorm.torch", "torch"}
    assert len(rows) == 2 * 4 * 2 * 2
    assert "geometric mean" in capsys.readouterr().out


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
