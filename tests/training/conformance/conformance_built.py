"""Comparisons with TRL that our side implements, kept apart from the cases, which TRL's side reads too."""

from collections.abc import Mapping

from conformance_cases import CASES

from rlhf_core.schemas.algorithms import specs

NOT_BUILT: Mapping[str, str] = {
    case.name: f"no algorithm `{case.algorithm}` yet" for case in CASES if case.algorithm not in specs()
}
"""Name of a case to the reason why there is nothing to compare yet."""

BUILT = [case for case in CASES if case.name not in NOT_BUILT]
"""Comparisons of all other cases."""
