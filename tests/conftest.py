"""Profiles of hypothesis: `HYPOTHESIS_PROFILE` chooses one, and where CI is set the choice is `ci`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# too_slow is about drawing: trees of tensors take some ms each, and the first example imports half of torch
_SLOW = [HealthCheck.too_slow]

settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci",
    settings.get_profile("ci"),
    max_examples=60,
    stateful_step_count=20,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "nightly",
    max_examples=2000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "mutants",
    max_examples=50,
    stateful_step_count=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # a mutant has to be found, not to be explained
    # mutation testers run one test function several times in one process
    suppress_health_check=[*_SLOW, HealthCheck.differing_executors],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
