"""The numbers the operator stands for, on every instruction set that runs here."""

from __future__ import annotations

from groupnorm.testing import numbers


def test_every_number_is_met(capsys):
    assert numbers.main() == 0
    printed = capsys.readouterr().out
    assert "NOT MET" not in printed
    assert printed.count("float32 offset") % 10 == 0


def test_the_command_can_fail(monkeypatch, capsys):
    monkeypatch.setattr(numbers, "OFFSETS", {1e3: 1e-9})
    assert numbers.main() == 1
    assert "NOT MET" in capsys.readouterr().out
