"""The command a person with a GPU runs, as far as the interpreter allows."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")

from groupnorm import cli


@pytest.mark.parametrize("work", ["forward_silu", "backward"])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_bench_verifies_the_kernels_beside_torch_and_a_copy(work, layout, capsys):
    arguments = ["--case", "1x20x2x3", "--work", work, "--layout", layout, "--dtype", "bfloat16"]
    assert cli.main(["bench", "--backend", "triton", *arguments, "--budget", "0.1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["contender"] for row in rows} == {"groupnorm", "copy", "torch"}
    assert all(row["verified"] for row in rows)


def test_verify_holds(capsys):
    assert cli.main(["verify", "--backend", "triton", "--json"]) == 0
    examined = json.loads(capsys.readouterr().out)
    (found,) = [entry for entry in examined if entry["implementation"] == "groupnorm:triton"]
    holds = {f["property"] for f in found["findings"] if f["verdict"] == "holds"}
    assert holds >= {"forward bfloat16", "backward float64", "huge values", "batch", "bad input"}


def test_profile_runs_the_kernels(capsys):
    arguments = ["--shape", "1,8,3,5", "--groups", "2", "--repeat", "1", "--backend", "triton"]
    for operation in ("fwd", "bwd-data", "bwd-gamma-beta"):
        assert cli.main(["profile", operation, *arguments, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert (row["instance"], row["verified"]) == ("triton", True)
