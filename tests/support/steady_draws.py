"""A plugin of pytest that makes Hypothesis draw the same examples in every run of CI.

With ``CI`` in the environment, Hypothesis takes its random numbers from the source of the test. It
also draws constants that it finds in the loaded modules of the project, so that any edit, and the
tests that ran before in the same process, would change the examples of every other test.
"""

from __future__ import annotations

import os

from hypothesis.internal.conjecture import providers


def pytest_configure() -> None:
    # Hypothesis has no setting for this. A version without the function has no such constants.
    if os.environ.get("CI") and hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = providers.Constants
