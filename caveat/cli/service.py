"""`caveat export` and `caveat serve`: from a posterior to where it is used, as one file or as a small HTTP service."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caveat.cli.verb import Common, Verb

if TYPE_CHECKING:
    from caveat.posterior import Posterior
    from caveat.recipe import Recipe
    from caveat.serve import Service

__all__ = ["Export", "Serve"]


@dataclass(frozen=True)
class Export(Verb):
    """Write a posterior's prediction to one file that returns mean, aleatoric and epistemic, without caveat."""

    posterior: Path  # a folder that `caveat fit` wrote, or with --model one that Python code saved
    out: Path = Path("posterior.pt2")  # the file to write: .pt2 for torch, or .onnx
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    draws: int | None = None  # posterior draws; the method's own number, or its closed form, unless given

    def run(self, common: Common) -> None:
        """Export."""
        from caveat.deploy import export
        from caveat.recipe import read_served

        posterior, recipe = read_served(self.posterior, common.place(), self.model)
        export(posterior, self.out, draws=self.draws, seed=common.seed)
        content: dict[str, Any] = {"out": str(self.out), "bytes": self.out.stat().st_size}
        takes = "what the network takes"
        if recipe is not None:
            content |= {"input_shape": list(recipe.input_shape)}
            takes = f"[{', '.join(map(str, ('rows', *recipe.input_shape)))}], scaled as in training"
        common.show(
            content, f"{self.out}: {content['bytes']:,} bytes; takes {takes}, gives mean, aleatoric and epistemic"
        )


@dataclass(frozen=True)
class Serve(Verb):
    """Answer requests for predictions over HTTP, with a page to try one input; Ctrl-C stops it."""

    posterior: Path  # a folder that `caveat fit` wrote, or with --model one that Python code saved
    host: str = "127.0.0.1"  # where to listen; 0.0.0.0 lets other machines in, for which there is no password
    port: int = 8000  # to listen at
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    draws: int | None = None  # posterior draws; the method's own number, or its closed form, unless given
    most_rows: int = 256  # of one request, and of the requests that are predicted together

    def run(self, common: Common) -> None:
        """Serve until stopped."""
        try:
            import uvicorn
        except ImportError as error:
            raise ImportError('a service needs its extra: pip install "caveat[serve]"') from error
        from caveat.recipe import read_served
        from caveat.serve import app_of

        posterior, recipe = read_served(self.posterior, common.place(), self.model)
        app = app_of(self._service(posterior, recipe, common.seed))
        address = f"http://{self.host}:{self.port}"
        common.show({"address": address, "posterior": str(self.posterior)}, f"{self.posterior} answers at {address}")
        uvicorn.run(app, host=self.host, port=self.port, log_level="warning")

    def _service(self, posterior: "Posterior", recipe: "Recipe | None", seed: int) -> "Service":
        """What answers; without a recipe, as Python code saves posteriors, inputs are taken as they are sent."""
        from caveat.recipe import example_of, prepared
        from caveat.serve import Service

        limits: dict[str, Any] = {"draws": self.draws, "seed": seed, "most_rows": self.most_rows}
        if recipe is None:
            return Service.of(posterior, **limits)
        return Service.of(
            posterior,
            table=recipe.preprocessing if recipe.preprocessing.get("columns") else None,
            prepare=lambda numbers: prepared(recipe, numbers),
            class_names=recipe.class_names,
            example=example_of(recipe),
            **limits,
        )
