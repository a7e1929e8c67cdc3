"""The conformance kit: random problems, checks of any result against the float64 reference, and the
properties that any implementation can be put to.

    implementation = from_function(my_group_norm)        # y = f(x, num_groups, weight, bias, eps)
    for entry in PROPERTIES:
        entry.check(implementation)                      # AssertionError where it does not hold
"""

from groupnorm.testing.checks import check_backward, check_forward
from groupnorm.testing.conformance import Asked, Conformance, examine, examine_apart
from groupnorm.testing.findings import Finding
from groupnorm.testing.implementation import Gradients, Implementation, from_function
from groupnorm.testing.inputs import Inputs, make_inputs
from groupnorm.testing.properties import PROPERTIES, Property
from groupnorm.testing.run import run

__all__ = [
    "PROPERTIES",
    "Asked",
    "Conformance",
    "Finding",
    "Gradients",
    "Implementation",
    "Inputs",
    "Property",
    "check_backward",
    "check_forward",
    "examine",
    "examine_apart",
    "from_function",
    "make_inputs",
    "run",
]
