"""The command line: what each verb prints, its JSON, its exit codes, and bad usage in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

import groupnorm
from groupnorm import _core, backends, cli
from groupnorm.arguments import BFLOAT16
from groupnorm.bench import roofline
from groupnorm.cli import app, usage
from groupnorm.cli.profile import OPERATIONS
from groupnorm.strategy import strategy_of

SMALL = ["--shape", "2,12,5,7", "--groups", "4"]
VERBS = ["profile", "verify", "bench", "explain", "report", "kernels", "info"]


def json_of(capsys, *arguments, code=0):
    assert cli.main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """The one line that bad usage gets."""
    assert cli.main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_that_is_legal(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--json" in shown
    (example,) = re.findall(r"Example: groupnorm (.*?) (?:Options|Arguments):", shown)
    command = app.typer.main.get_command(app.app)
    words = shlex.split(example)
    assert words[0] == verb
    context = command.commands[verb].make_context(verb, words[1:])
    assert context.params


def test_without_arguments_there_is_help(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nosuch"], "nosuch"),
        (["--nosuch"], "--nosuch"),
        (["profile"], "OP"),
        (["profile", "sideways"], "sideways"),
        (["profile", "fwd", "--shape", "2,12"], "--groups"),
        (["profile", "fwd", "--shape", "twelve", "--groups", "2"], "twelve"),
        (["profile", "fwd", "--shape", "2,0,3", "--groups", "2"], "at least 1"),
        (["profile", "fwd", "--groups", "0"], "at least 1"),
        (["profile", "fwd", "--shape", "1,99999999999", "--groups", "7"], "nearest"),
        (["profile", "fwd", "--shape", "1,32,99999999999", "--groups", "2"], "smaller problem"),
        (["report", "--out", "."], "--out"),
        (["bench", "--save", "."], "--save"),
        (["kernels", "--target", "sm_10"], "sm_10"),
        (["kernels", "--op", "sideways"], "sideways"),
        (["kernels", "--shape", "1,10,8", "--group-sizes", "3,3"], "'3,3'"),
        (["kernels", "--shape", "1,10,8", "--group-sizes", "3,x"], "'3,x'"),
        (["kernels", "--shape", "1,10,8", "--groups", "2", "--group-sizes", "5,5"], "--groups"),
        (["kernels", "--length", "1", "8", "8", "2", "4", "--group-sizes", "5,5"], "--length"),
        (["kernels", "--shape", "1,8,8", "--groups", "2", "--layout", "nhwc"], "(1, 8, 8)"),
        (["profile", "fwd", "--shape", "2,12,3", "--groups", "5"], "1, 2, 3, 4, 6, 12"),
        (["profile", "fwd", "--length", "1", "2", "3"], "--length"),
        (["profile", "fwd", "--length", "1", "2", "2", "4", "3", "--groups", "4"], "--length"),
        (["profile", "fwd", "--layout", "nwhc"], "nwhc"),
        (["profile", "fwd", "--dtype", "int8"], "int8"),
        (["profile", "fwd", "--param-dtype", "int8"], "int8"),
        (["profile", "fwd", "--activation", "swish"], "swish"),
        (["profile", "fwd", "--activation", "swish:nan"], "swish:nan"),
        (["profile", "fwd", "--init", "nosuch"], "nosuch"),
        (["profile", "fwd", "--init", "nosuch.npy"], "nosuch.npy"),
        (["profile", "fwd", "--threads", "0"], "--threads"),
        (["profile", "fwd", "--repeat", "0"], "--repeat"),
        (["profile", "fwd", "--seed", "-1"], "--seed"),
        (["profile", "fwd", "--backend", "nosuch"], "nosuch"),
        (["profile", "fwd", "--isa", "nosuch"], "nosuch"),
        (["profile", "fwd", "--isa", "portable", "--backend", "reference"], "--isa"),
        (["explain", "--groups", "7"], "--groups"),
        (["report", "--budget", "0"], "--budget"),
        (["report", "--out", "no/such/folder/x.html"], "--out"),
        (["report", "--impl", "nosuch"], "nosuch"),
        (["report", "--rows", "nosuch.jsonl"], "--rows"),
        (["info", "extra"], "extra"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, named, capsys):
    assert named in refused(capsys, *arguments)


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("layout", list(usage.LAYOUTS))
def test_profile_verifies_and_times(operation, layout, capsys):
    found = json_of(
        capsys, "profile", operation, *SMALL, "--layout", layout, "--isa", "all", "--repeat", "3",
        "--activation", "silu",
    )  # fmt: skip
    isas = _core.isa_list()
    names = ["triton", *(f"cpu {name}" for name, _, _ in isas), "reference"]
    assert [row["instance"] for row in found["rows"]] == names
    reasons = {f"cpu {name}": why for name, why, _ in isas}
    for row in found["rows"]:
        if row["instance"] == "triton":
            assert row["why_not"]
        else:
            assert row["why_not"] == reasons.get(row["instance"])
        if row["why_not"] is None:
            assert row["groups_verified"] == 4
            assert row["verified"] is True
            assert row["worst_ulp"] < 64
            moved = row["gigabytes_per_second"] * row["microseconds"] * 1e3
            assert moved == pytest.approx(OPERATIONS[operation] * 2 * 12 * 35 * 4)
    assert found["best"] in names


def test_profile_takes_amds_order(capsys):
    found = json_of(capsys, "profile", "fwd", "--length", "1", "3", "5", "4", "2", "--repeat", "1")
    assert found["problem"]["shape"] == [1, 8, 3, 5]
    assert found["problem"]["groups"] == 4


@pytest.mark.parametrize("init", usage.INITS)
@pytest.mark.parametrize("dtype", list(usage.DTYPES))
def test_every_way_to_fill_x_is_verified(init, dtype, capsys):
    for operation in ("fwd", "bwd"):
        found = json_of(
            capsys, "profile", operation, *SMALL, "--init", init, "--dtype", dtype,
            "--param-dtype", dtype, "--repeat", "1", "--layout", "nhwc",
        )  # fmt: skip
        assert all(row["verified"] for row in found["rows"] if row["why_not"] is None)


def test_x_comes_from_a_file(tmp_path, capsys):
    x = np.arange(2 * 12 * 35, dtype=np.float32).reshape(2, 12, 5, 7)
    for name, array in {"a": x, "b": x.astype(BFLOAT16), "c": x.astype(int)}.items():
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        problem = usage.asked(None, "2,12,5,7", 4, "nchw", "float32", None, "none")
        loaded = usage.make_inputs(problem, str(path)).x
        assert loaded.dtype == np.float32
        assert np.array_equal(loaded, array.astype(np.float32))
    arguments = ["profile", "fwd", "--repeat", "1", "--init"]
    assert cli.main([*arguments, str(path), *SMALL]) == 0
    capsys.readouterr()
    assert "(2, 12, 5, 7)" in refused(capsys, *arguments, str(path), "--layout", "nhwc", *SMALL)
    np.save(path, np.array(["a", "b"]))
    assert "real numbers" in refused(capsys, *arguments, str(path), *SMALL)
    np.savez(tmp_path / "two.npz", a=x, b=x)
    (tmp_path / "two.npz").rename(path)
    assert "several" in refused(capsys, *arguments, str(path), *SMALL)
    path.write_bytes(b"\x93NUMPY broken")
    assert str(path) in refused(capsys, *arguments, str(path), *SMALL)


def test_x_with_nan_is_verified_too(tmp_path, capsys):
    x = np.ones((2, 12, 5, 7), np.float32)
    x[0, 3, 2, 2], x[1, 8, 1, 1] = np.nan, np.inf
    np.save(tmp_path / "x.npy", x)
    with np.errstate(all="ignore"):
        for operation in ("fwd", "bwd"):
            found = json_of(
                capsys, "profile", operation, *SMALL, "--init", str(tmp_path / "x.npy"),
                "--repeat", "1",
            )  # fmt: skip
            assert all(row["verified"] for row in found["rows"] if row["why_not"] is None)


def test_a_wrong_backend_is_named_with_its_element(monkeypatch, capsys):
    (reference,) = [entry for entry in backends.BACKENDS if entry.name == "reference"]

    def off_by_one(call):
        found = reference.forward(call)
        found.y[1, 3, 2, 4] += 1
        return found

    wrong = reference._replace(forward=off_by_one)
    monkeypatch.setattr(backends, "BACKENDS", (*backends.BACKENDS[:-1], wrong))
    arguments = ["profile", "fwd", *SMALL, "--backend", "reference", "--repeat", "1"]
    assert cli.main(arguments) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "WRONG" in shown
    assert "(1, 3, 2, 4): expected" in shown
    assert re.search(r"reference │ – │ – │ –", shown)
    assert cli.main([*arguments, "--no-verify"]) == 0
    assert "not asked" in capsys.readouterr().out


def test_profile_restores_threads_and_isa(restored_threads, capsys):
    groupnorm.set_num_threads(2)
    before = _core.isa_selected()
    json_of(
        capsys, "profile", "fwd", *SMALL, "--threads", "1", "--isa", "portable", "--repeat", "1"
    )
    assert groupnorm.get_num_threads() == 2
    assert _core.isa_selected() == before


def test_info_as_json(capsys):
    found = json_of(capsys, "info")
    assert found["version"] == groupnorm.__version__
    assert {entry["name"] for entry in found["backends"]} >= {"cpu", "reference"}
    assert "torch" in found["frameworks"]
    assert cli.main(["info"]) == 0
    assert "frameworks:" in capsys.readouterr().out


def test_explain(monkeypatch, capsys):
    monkeypatch.setattr(roofline, "COPY_BYTES", (1 << 16, 1 << 20))
    monkeypatch.setattr(roofline, "_SECONDS_EACH", 0.002)
    monkeypatch.setattr("groupnorm.cli.explain._SECONDS_EACH", 0.002)
    monkeypatch.setattr("groupnorm.cli.explain._ACTIVATIONS", (None,))
    arguments = ["explain", "--shape", "2,12,16,16", "--groups", "4", "--activation", "silu"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("must move", "bound by", "strategy: whole groups", "Is it ever bound by compute?",
                 "Held for the backward", "Other numbers of groups"):  # fmt: skip
        assert part in shown
    found = json_of(capsys, *arguments)
    forward, backward = found["roofs"]
    tensor = 2 * 12 * 256 * 4
    parameters, statistics = 2 * 12 * 4, 2 * 2 * 4 * 4
    assert forward["must_move"] == 2 * tensor + parameters + statistics
    assert backward["must_move"] == 3 * tensor + 2 * parameters + statistics
    assert forward["time"] == max(forward["memory_time"], forward["arithmetic_time"])
    assert forward["binds"] in ("arithmetic", forward["level"])
    assert [entry["groups"] for entry in found["group_counts"]] == [1, 2, 3, 4, 6, 12]
    held = found["held_for_backward"]
    assert held["norm and activation apart"] - held["groupnorm"] == tensor


@pytest.mark.parametrize(
    ("shape", "groups", "last", "threads", "name"),
    [
        ((2, 64, 64, 64), 32, False, 2, "whole groups"),
        ((1, 64, 256, 256), 1, False, 2, "pieces"),
        ((1, 64, 256, 256), 32, True, 2, "pieces"),
        ((2, 64, 256, 256), 32, True, 2, "whole samples"),
        ((4096, 256), 32, False, 2, "samples in lanes"),
        ((1, 8, 4, 4), 3 + 1, True, 2, "whole samples"),
        ((1, 4, 2, 2), 2, False, 2, "one by one"),
    ],
)
def test_the_strategy_is_the_cores_own(shape, groups, last, threads, name):
    found = strategy_of(shape, groups, np.dtype(np.float32), last, threads)
    assert found.name == name
    assert found.why
    assert 1 <= found.threads <= threads


def test_a_reader_that_has_had_enough_is_no_error():
    code = (
        "import sys; from groupnorm import cli; sys.stdout.write('x' * 100000);"
        "sys.exit(cli.main(['info']))"
    )
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" | head -c 10'],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("GROUPNORM_ISA", "nosuch"), ("GROUPNORM_BACKEND", "nosuch")]
)
def test_a_forced_choice_that_does_not_exist_is_one_line(variable, value):
    done = subprocess.run(
        [sys.executable, "-m", "groupnorm", "profile", "fwd", *SMALL],
        env={**os.environ, variable: value}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert value in done.stderr


@pytest.mark.parametrize("redirected", ["> /dev/full", "--json >&-", "| head -c 1"])
def test_output_that_cannot_be_written_is_no_traceback(redirected):
    command = f'PYTHONIOENCODING=ascii "{sys.executable}" -m groupnorm profile fwd --repeat 1 '
    done = subprocess.run(
        ["bash", "-c", command + shlex.join(SMALL) + " " + redirected],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


def test_kernels_without_triton_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton" in refused(capsys, "kernels", *SMALL, "--no-count")


def test_without_typer_the_extra_is_named(monkeypatch, capsys):
    for name in list(sys.modules):
        if name.startswith("groupnorm.cli.") or name.partition(".")[0] == "typer":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("groupnorm.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main([]) == 2
    assert 'pip install "groupnorm[cli]"' in capsys.readouterr().err


def test_the_command_imports_no_framework():
    code = (
        "import sys; from groupnorm import cli; cli.main(['info']);"
        "print([m for m in ('torch', 'jax', 'onnxruntime', 'openvino', 'plotly', 'matplotlib',"
        " 'triton') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
