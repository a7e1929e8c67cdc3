"""What the inference runtimes have in common: what they leave out."""

from __future__ import annotations

from groupnorm.bench.problems import BenchProblem


def why_not_inference(problem: BenchProblem) -> str | None:
    if problem.is_backward:
        return "has no backward"
    if problem.layout != "first":
        return "defines group norm on channels-first only"
    if problem.dtype != "float32":
        return "is measured in float32 only"
    return None
