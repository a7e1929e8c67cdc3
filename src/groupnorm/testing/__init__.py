"""The conformance kit: random problems, and checks of any result against the float64 reference."""

from groupnorm.testing.checks import check_backward, check_forward
from groupnorm.testing.inputs import Inputs, make_inputs
from groupnorm.testing.run import run

__all__ = ["Inputs", "check_backward", "check_forward", "make_inputs", "run"]
