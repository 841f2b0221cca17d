"""What type checkers make of `import caveat`: read by `make types`, not run.

Each line that must be refused has an ignore, and an ignore that nothing needs is an error of mypy's.
"""

from typing_extensions import assert_type

import caveat
from caveat import data

caveat.LastLayerLaplace(bogus=3)  # type: ignore[call-arg]
caveat.SSVI(density="thin")  # type: ignore[arg-type]
caveat.no_such_name  # type: ignore[attr-defined]  # noqa: B018
assert_type(caveat.LastLayerLaplace(default_draws=30), caveat.LastLayerLaplace)
assert_type(caveat.data.load("digits"), data.DataSet)


def use(task: caveat.Task, posterior: caveat.Posterior) -> None:
    """The names of the tutorial."""
    assert_type(caveat.fit(task, caveat.SWAG()), caveat.Posterior)
    caveat.deploy(posterior)
    caveat.evaluate(posterior, {"clean": task.validation}, draws="many")  # type: ignore[arg-type, dict-item]
