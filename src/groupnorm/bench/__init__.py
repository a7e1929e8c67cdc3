"""The benchmark harness: every result is verified before it is timed, beside rivals and a copy.

``groupnorm bench`` measures the problems of cases.py in one process, all contenders in
turns, so that the ratios of one run can be trusted even where the machine's speed drifts.
"""
