"""The harness: it takes turns fairly, never times a wrong result, and adds up its bars right."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import groupnorm
from groupnorm import cli
from groupnorm.bench import bars, command, growth, harness, own, ratios, summary, timer
from groupnorm.bench.compare import compare
from groupnorm.bench.contender import Contender, Prepared
from groupnorm.bench.harness import Measurement
from groupnorm.bench.options import Options, UsageError, checked_rivals
from groupnorm.bench.problems import (
    DTYPES,
    LAYOUTS,
    MEASURED_SUITES,
    WORKS,
    BenchProblem,
    Drawn,
    measured_cases,
    problems,
)
from groupnorm.bench.rivals import RIVALS, installed
from groupnorm.bench.rows import Row, make_stamp, read_rows, write_rows
from groupnorm.bench.selection import QUICK_CASES, budget_seconds, measurements
from groupnorm.bench.verify import Verifier
from groupnorm.cases import Case

TINY = BenchProblem(Case("volume_audio_rows", (4, 32, 8, 8), 8), "forward", "float32", "first")


class FakeClock:
    """Time passes only in the calls that it makes."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def call(self, name, *seconds):
        durations = itertools.cycle(seconds)

        def run():
            self.log.append(name)
            self.now += next(durations)

        return run


def test_turns_are_taken_in_rounds_of_everybody():
    clock = FakeClock()
    calls = {name: clock.call(name, 0.03) for name in "abcd"}
    warm_up = 2 * len(calls)
    timings = timer.alternate(calls, 4.0, clock=clock)
    turns = clock.log[warm_up:]
    rounds = [turns[start : start + 4] for start in range(0, len(turns), 4)]
    assert len(rounds) >= 7
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert clock.now == pytest.approx(4.0, abs=0.2)
    for timing in timings.values():
        assert len(timing.samples) == len(rounds)
        assert timing.low == pytest.approx(0.03)


@pytest.mark.parametrize("count", range(1, 9))
def test_everybody_follows_everybody_equally_often(count):
    orders = timer.balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = [pair for order in orders for pair in itertools.pairwise(order)]
    counts = {pair: pairs.count(pair) for pair in itertools.permutations(range(count), 2)}
    assert len(set(counts.values())) <= 1


def test_short_calls_are_repeated_within_a_turn():
    clock = FakeClock()
    timing = timer.alternate({"short": clock.call("short", 1e-6)}, 0.1, clock=clock)["short"]
    assert timing.low == pytest.approx(1e-6)
    assert len(clock.log) >= 200 * len(timing.samples)


def test_seven_rounds_even_without_budget():
    clock = FakeClock()
    timings = timer.alternate({n: clock.call(n, 0.05) for n in "ab"}, 1e-9, clock=clock)
    assert {len(timing.samples) for timing in timings.values()} == {7}


def test_a_slow_call_gets_three_turns_and_the_others_go_on():
    clock = FakeClock()
    calls = {"slow": clock.call("slow", 5.0), "fast": clock.call("fast", 0.03)}
    timings = timer.alternate(calls, 30.0, clock=clock)
    assert len(timings["slow"].samples) == 3
    assert len(timings["fast"].samples) > 100
    alone = timer.alternate({"slow": calls["slow"]}, 1.0, clock=clock)
    assert len(alone["slow"].samples) == 3


def test_the_figure_is_a_low_quantile():
    timing = timer.Timing((5.0, 1.0, 2.0, 9.0, 3.0, 4.0, 8.0, 7.0, 6.0, 10.0, 11.0))
    assert timing.low == 3.0
    assert timing.spread == 2.0


class Fake(Contender):
    """A rival that computes what it is told to, and counts how often."""

    name = "fake"
    version = "1"

    def __init__(self, change=0.0, held_to="rival", name="fake"):
        self.change, self.held_to, self.name, self.calls = change, held_to, name, 0

    def prepare(self, inputs, problem, threads):
        ours = own.DropIn().prepare(inputs, problem, threads)

        def run():
            self.calls += 1
            results = ours.results()
            last = results[list(results)[-1]]
            last += np.asarray(self.change, last.dtype)
            return results

        return Prepared(run, lambda results: results)


def run_one(problem, *contenders, threads=1):
    field = {contender.name: contender for contender in contenders}
    measurement = Measurement(problem, threads, tuple(field))
    (rows,) = harness.run([measurement], field, 0.05)
    return {row.contender: row for row in rows}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_wrong_rival_is_not_timed(work, dtype):
    problem = replace(TINY, work=work, dtype=dtype)
    wrong, right = Fake(change=20.0), Fake(name="right")
    rows = run_one(problem, own.OWN["groupnorm"], wrong, right)
    assert wrong.calls == 1
    assert rows["fake"].verified is False
    assert rows["fake"].microseconds is None
    assert "off by" in rows["fake"].reason
    assert rows["right"].verified is True
    assert rows["right"].times_ours > 0
    assert not harness.ours_is_wrong(list(rows.values()))


@pytest.mark.parametrize("work", WORKS)
def test_our_own_results_are_held_to_the_bounds(work):
    """A change that a rival gets away with is wrong in groupnorm."""
    problem = replace(TINY, work=work)
    rows = run_one(problem, Fake(1e-4, "bounds", "groupnorm"), Fake(1e-4))
    assert rows["fake"].verified is True
    assert rows["groupnorm"].verified is False
    assert rows["groupnorm"].reason
    assert harness.ours_is_wrong(list(rows.values()))


def test_large_tensors_are_judged_on_some_groups_of_the_whole():
    problem = replace(TINY, case=Case("vae", (1, 64, 64, 64), 4))
    inputs = problem.draw()
    contender = own.OWN["groupnorm"]
    results = contender.prepare(inputs, problem, 1).results()
    verifier = Verifier(problem, inputs)
    assert verifier.why_wrong(contender, results) is None
    assert verifier.why_wrong(Fake(), results) is None
    results["y"][:] = np.roll(results["y"], 1)
    assert "outside their bound" in verifier.why_wrong(contender, results)
    assert "off by" in verifier.why_wrong(Fake(), results)
    assert "shape" in verifier.why_wrong(Fake(), {"y": results["y"][0]})


def test_a_rival_that_raises_does_not_end_the_run():
    class Raises(Fake):
        def prepare(self, inputs, problem, threads):
            raise RuntimeError("no such kernel\nand more")

    rows = run_one(TINY, own.OWN["groupnorm"], Raises())
    assert rows["fake"].verified is None
    assert rows["fake"].reason == "raised RuntimeError: no such kernel"
    assert rows["groupnorm"].verified
    with pytest.raises(RuntimeError, match="no such kernel"):
        run_one(TINY, Raises(name="groupnorm"))


def test_a_copy_is_verified():
    copy = own.OWN["copy"]
    inputs = TINY.draw()
    verifier = Verifier(TINY, inputs)
    results = copy.prepare(inputs, TINY, 1).results()
    assert verifier.why_wrong(copy, results) is None
    results["copy"].flat[-1] += 1
    assert "differ" in verifier.why_wrong(copy, results)


def test_threads_are_set_and_restored(restored_threads):
    groupnorm.set_num_threads(1)
    seen = []

    class Looks(Fake):
        def prepare(self, inputs, problem, threads):
            seen.append((threads, groupnorm.get_num_threads()))
            return super().prepare(inputs, problem, threads)

        def finish(self):
            seen.append("finished")

    run_one(TINY, Looks(), threads=2)
    assert seen == [(2, 2), "finished"]
    assert groupnorm.get_num_threads() == 1


def test_inputs_are_drawn_once_per_tensor():
    drawn = Drawn()
    first = drawn.inputs_of(TINY)
    silu = drawn.inputs_of(replace(TINY, work="backward_silu"))
    assert silu.x is first.x
    assert (first.options["activation"], silu.options["activation"]) == (None, "silu")
    last = drawn.inputs_of(replace(TINY, layout="last"))
    assert last.x.shape == (4, 8, 8, 32)


@pytest.mark.parametrize("rival", [name for name in RIVALS if name != "torch.compile"])
def test_rivals_are_right_and_say_what_they_leave_out(rival):
    if rival not in installed():
        pytest.skip(f"{rival} is not installed")
    contender = RIVALS[rival].load()
    shapes = [((2, 12, 3, 5), 4), ((2, 12, 7), 3)]
    threads = 1 if rival == "numpy" else 2
    taken = 0
    for shape, groups in shapes:
        for problem in problems([Case("ck", shape, groups)]):
            why_not = contender.why_not(problem, threads)
            if why_not is None:
                taken += 1
                results = contender.prepare(problem.draw(), problem, threads).results()
                assert Verifier(problem, problem.draw()).why_wrong(contender, results) is None
            else:
                assert why_not
    assert taken or rival == "jax"


def test_a_rival_not_asked_for_is_not_imported():
    code = (
        "import sys; from groupnorm.bench import command, selection, options;"
        "selection.measurements(options.Options(rivals=('numpy',)));"
        "print([m for m in ('torch', 'jax', 'onnx', 'onnxruntime', 'openvino', 'matplotlib')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_measured_cases():
    cases = list(measured_cases())
    assert {case.suite for case in cases} == set(MEASURED_SUITES)
    assert sum(case.suite == "ck" for case in cases) == 8
    assert max(case.elements for case in cases) * 4 <= 300_000_000
    assert "video/1x128x20x128x128-g32" in {case.name for case in cases}
    rows = list(problems([Case("volume_audio_rows", (4096, 256), 32)], ["forward"], ["float32"]))
    assert [problem.layout for problem in rows] == ["first"]


def test_the_quick_selection_is_a_spread():
    quick = measurements(Options(quick=True, rivals=("torch", "numpy")))
    assert {m.problem.case.name for m in quick} == set(QUICK_CASES)
    assert {m.problem.case.suite for m in quick} == set(MEASURED_SUITES)
    kinds = {(m.problem.work, m.problem.dtype, m.problem.layout, m.threads) for m in quick}
    assert kinds == set(itertools.product(WORKS, DTYPES, LAYOUTS, (1, 2)))
    assert all("torch" in m.contenders for m in quick)
    assert 0 < sum("numpy" in m.contenders for m in quick) < 10
    assert budget_seconds(Options(quick=True), len(quick)) == 300
    narrowed = measurements(Options(quick=True, case="4096x256", works=("forward",), rivals=()))
    assert {m.problem.case.name for m in narrowed} == {"volume_audio_rows/4096x256-g32"}


def row(case="vae/1x512x64x64-g32", contender="groupnorm", microseconds=100.0, **fields):
    plain = Row(
        case, (1, 512, 64, 64), 32, "forward", "float32", "first", 2, contender, "1", 8 << 20, True,
        microseconds=microseconds, samples=9, spread=1.1,
    )  # fmt: skip
    return replace(plain, **fields)


def verdict(rows, bar):
    (found,) = [v for v in summary.verdicts(rows) if v.bar == bar]
    return found


def test_rows_survive_a_file(tmp_path):
    rows = [row(), row(contender="numpy", microseconds=None, verified=False, reason="y: off by 1")]
    stamp = make_stamp({"numpy": np.__version__})
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        write_rows(file, rows, stamp)
    assert read_rows(path) == [(line, stamp) for line in rows]
    assert stamp.cpu
    assert stamp.isa == groupnorm.info().isa


def test_the_commit_is_that_of_this_project_or_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_stamp({}).commit is None


def test_bars_against_torch():
    rows = [
        row("vae/a"), row("vae/a", "torch", 400.0),
        row("ck/b"), row("ck/b", "torch", 100.0),
        row("ck/c"), row("ck/c", "torch", microseconds=None, verified=False),
    ]  # fmt: skip
    mean, worst = verdict(rows, summary.TORCH_MEAN), verdict(rows, summary.TORCH_WORST)
    assert (mean.value, mean.limit, mean.met, mean.cases) == (pytest.approx(2.0), 1.6, True, 2)
    assert (worst.value, worst.limit, worst.met, worst.where) == (1.0, 0.95, True, "ck/b")
    assert verdict(rows, summary.VAE_TORCH).value == 4.0
    slower = [replace(r, microseconds=300.0) if r.contender == "groupnorm" else r for r in rows]
    assert verdict(slower, summary.TORCH_MEAN).words == "NOT MET"
    assert verdict(slower, summary.TORCH_WORST).words == "NOT MET"
    assert verdict(slower, summary.VAE_TORCH).words == "NOT MET"


def test_bars_against_a_copy():
    def rows(out, **fields):
        return [row(**fields), row(contender="groupnorm out=", microseconds=out, **fields),
                row(contender="copy", microseconds=50.0, **fields)]  # fmt: skip

    assert verdict(rows(64.0), summary.COPY_WORST).met
    assert not verdict(rows(66.0), summary.COPY_WORST).met
    assert verdict(rows(66.0, layout="last"), summary.COPY_WORST).met
    assert verdict(rows(66.0, dtype="bfloat16"), summary.COPY_MEAN).met
    assert not [v for v in summary.verdicts(rows(66.0, tensor_bytes=65 << 20)) if "copy" in v.bar]
    assert not [v for v in summary.verdicts(rows(66.0, tensor_bytes=3_999_999)) if "copy" in v.bar]
    backward = verdict(rows(1.0, work="backward"), summary.COPY_WORST)
    assert (backward.value, backward.limit) == (2.0, 1.9)


def test_bars_of_two_threads():
    rows = [row(threads=1, microseconds=185.0), row(threads=2, microseconds=100.0)]
    assert verdict(rows, summary.VAE_THREADS).met
    rows[0] = replace(rows[0], microseconds=170.0)
    missed = verdict(rows, summary.VAE_THREADS)
    assert (missed.words, missed.where) == ("NOT MET", "vae/1x512x64x64-g32")
    assert not summary.verdicts([replace(r, case="ck/a") for r in rows])


def test_the_higher_bar_where_torch_is_slowest():
    assert bars.bar_of("backward", "bfloat16", "last").torch_mean == 10
    assert bars.bar_of("backward", "bfloat16", "first").torch_mean == 2.5
    assert bars.copy_limit("backward", "bfloat16", "last") == pytest.approx(2.4 * 1.35)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "new" / "rows.jsonl"
    code = cli.main(
        ["bench", "--case", "4x32x8x8", "--work", "forward", "--work", "backward", "--dtype",
         "float32", "--threads", "1", "--layout", "first", "--rivals", "numpy", "--budget", "0.1",
         "--save", str(path)]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert code == 0
    assert "volume_audio_rows/4x32x8x8-g8" in shown
    rows = [line for line, _ in read_rows(path)]
    assert [line.contender for line in rows] == ["groupnorm", "groupnorm out=", "copy", "numpy"] * 2
    for line in rows:
        if line.contender == "groupnorm out=" and line.work == "backward":
            assert line.verified is None
        else:
            assert line.verified
            assert line.samples >= 3
            tensors = 3 if line.work == "backward" and line.contender != "copy" else 2
            moved = line.gigabytes_per_second * line.microseconds * 1e3
            assert moved == pytest.approx(tensors * 4 * 32 * 64 * 4)
    ours, _, copy, numpy = rows[:4]
    assert numpy.times_ours == pytest.approx(numpy.microseconds / ours.microseconds)
    assert ours.share_of_copy == pytest.approx(copy.microseconds / ours.microseconds)


def test_a_wrong_groupnorm_exits_1(monkeypatch, capsys):
    monkeypatch.setitem(own.OWN, "groupnorm", Fake(1e-3, "bounds", "groupnorm"))
    code = cli.main(
        ["bench", "--case", "4x32x8x8", "--work", "forward", "--dtype", "float32", "--threads", "1",
         "--layout", "last", "--rivals", "none", "--budget", "0.1"]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert code == 1
    assert "wrong" in shown


def test_a_forced_isa_is_stamped(tmp_path, isa):
    path = tmp_path / "rows.jsonl"
    code = cli.main(
        ["bench", "--case", "1x6x1-", "--work", "forward", "--dtype", "float32", "--threads", "1",
         "--layout", "first", "--rivals", "none", "--budget", "0.01", "--isa", isa,
         "--save", str(path)]
    )  # fmt: skip
    assert code == 0
    assert {stamp.isa for _, stamp in read_rows(path)} == {isa}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "nosuch"], "nosuch"),
        (["--case", "nosuch"], "nosuch"),
        (["--work", "sideways"], "sideways"),
        (["--dtype", "int8"], "int8"),
        (["--layout", "middle"], "middle"),
        (["--threads", "0"], "0"),
        (["--threads", "two"], "--threads"),
        (["--rivals", "nosuch"], "nosuch"),
        (["--budget", "-1"], "-1"),
        (["--budget", "nan"], "nan"),
        (["--nosuch"], "--nosuch"),
        (["--isa", "nosuch"], "nosuch"),
        (["--suite", "ck", "--case", "2x63x2163"], "2x63x2163"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, named, capsys):
    assert cli.main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1
    assert named in shown.err


def test_a_file_that_cannot_be_written_is_bad_usage(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert (
        cli.main(["bench", "--rivals", "none", "--save", str(tmp_path / "file" / "x.jsonl")]) == 2
    )
    assert "--save" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_one_line_and_keeps_older_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("older\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_rows", full)
    code = cli.main(
        ["bench", "--case", "1x6x1-", "--work", "forward", "--dtype", "float32", "--threads", "1",
         "--layout", "first", "--rivals", "none", "--budget", "0.01", "--save", str(path)]
    )  # fmt: skip
    assert code == 2
    assert "--save" in capsys.readouterr().err
    assert path.read_text() == "older\n"


def test_an_interrupted_run_keeps_older_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("older\n")

    def interrupted(*_, **__):
        yield [row()]
        raise KeyboardInterrupt

    monkeypatch.setattr(command.harness, "run", interrupted)
    assert cli.main(["bench", "--case", "1x6x1-", "--rivals", "none", "--save", str(path)]) == 130
    assert path.read_text() == "older\n"
    assert "rows.jsonl.part" in capsys.readouterr().out
    assert len(read_rows(tmp_path / "rows.jsonl.part")) == 1
    path.unlink()
    assert cli.main(["bench", "--case", "1x6x1-", "--rivals", "none", "--save", str(path)]) == 130
    assert len(read_rows(path)) == 1


def test_a_rival_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(RIVALS, "torch", replace(RIVALS["torch"], packages=("no_such_package",)))
    with pytest.raises(UsageError, match="pip install no_such_package"):
        checked_rivals("torch")
    assert "torch" not in installed()


def saved(rows):
    return [(line, make_stamp({})) for line in rows]


def test_a_comparison_takes_out_drift_and_noise():
    old = [
        row(contender="copy", microseconds=100.0, spread=1.0),
        row(microseconds=300.0, spread=1.02),
        row(case="vae/b", microseconds=300.0, spread=1.02),
        row(case="vae/c", microseconds=300.0, spread=1.4),
        row(case="vae/gone", microseconds=1.0),
    ]
    # The machine is twice as slow: one case kept pace, one got slower, one is too noisy to say.
    new = [
        row(contender="copy", microseconds=200.0, spread=1.0),
        row(microseconds=600.0, spread=1.02),
        row(case="vae/b", microseconds=900.0, spread=1.02),
        row(case="vae/c", microseconds=800.0, spread=1.0),
        row(case="vae/wrong", microseconds=None, verified=False),
    ]
    found = compare(saved(old), saved(new))
    assert found.drift == pytest.approx(2.0)
    assert [change.problem[0] for change in found.slower] == ["vae/b"]
    assert found.slower[0].ratio == pytest.approx(1.5)
    assert not found.faster
    assert len(found.changes) == 3
    assert [c.problem[0] for c in compare(saved(new), saved(old)).faster] == ["vae/b"]
    # Each problem has the copy that was timed with it.
    old.append(row(case="vae/b", contender="copy", microseconds=10.0, spread=1.0))
    new.append(row(case="vae/b", contender="copy", microseconds=30.0, spread=1.0))
    assert not compare(saved(old), saved(new)).slower


def test_compare_prints_what_changed(tmp_path, capsys):
    path = tmp_path / "old.jsonl"
    command_line = ["bench", "--case", "1x6x1-", "--work", "forward", "--dtype", "float32",
                    "--threads", "1", "--layout", "first", "--rivals", "none", "--budget",
                    "0.05"]  # fmt: skip
    assert cli.main([*command_line, "--save", str(path)]) == 0
    older = [
        (replace(line, microseconds=line.microseconds and 1e9 * line.microseconds), stamp)
        if line.contender == "groupnorm"
        else (line, stamp)
        for line, stamp in read_rows(path)
    ]
    with path.open("w") as file:
        for line, stamp in older:
            write_rows(file, [line], stamp)
    capsys.readouterr()
    assert cli.main([*command_line, "--compare", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "faster than before" in shown
    # A billion times: whatever else the machine does, all of the time is gone.
    assert "-100%" in shown


@pytest.mark.parametrize("text", ["", "not json\n", '{"case": 1}\n'])
def test_a_file_without_rows_cannot_be_compared(text, tmp_path, capsys):
    path = tmp_path / "old.jsonl"
    path.write_text(text)
    assert cli.main(["bench", "--rivals", "none", "--compare", str(path)]) == 2
    assert cli.main(["bench", "--rivals", "none", "--compare", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("--compare") == 2


def test_ratios_time_checked_pairs_and_name_what_misses(monkeypatch, capsys):
    pair = ratios.Pair(
        "three off", ratios.Side((1, 6, 5), 3, elements_off=3), ratios.Side((1, 6, 4), 3), 1e-9
    )
    monkeypatch.setattr(ratios, "PAIRS", (pair,))
    assert ratios.main(["--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert all("NOT MET" in line for line in lines[:8])
    assert lines[-1] == "0 of 8 met"


def test_ratios_refuse_a_wrong_result(monkeypatch):
    wrong = groupnorm.group_norm

    def off(*args, **options):
        y, *statistics = wrong(*args, **options)
        return y + 1, *statistics

    monkeypatch.setattr(groupnorm, "group_norm", off)
    with pytest.raises(AssertionError):
        ratios.prepare(ratios.Side((1, 6, 4), 3), "forward", "first")


def test_growth_measures_and_draws(tmp_path):
    chosen = growth.measurements(growth.cases(1e6)[:1], [1])
    rows = [line for new in harness.run(chosen, own.OWN, 0.1) for line in new]
    assert len(growth.cases()) == 12
    assert growth.cases()[-1].elements == pytest.approx(5e8, rel=1e-6)
    assert len(rows) == 7
    assert all(line.verified for line in rows)
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "growth.png"
    growth.plot(rows, make_stamp({}), path)
    assert path.read_bytes().startswith(b"\x89PNG")
