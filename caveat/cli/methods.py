"""`caveat methods`: the methods, and which likelihoods each supports."""

from dataclasses import dataclass

from caveat.cli.verb import Common, Verb, summary

__all__ = ["Methods"]


@dataclass(frozen=True)
class Methods(Verb):
    """List the methods, what each one is, and which likelihoods it supports."""

    def run(self, common: Common) -> None:
        """Print the list and the matrix."""
        from caveat import likelihoods
        from caveat.methods import discover

        known = [name for name in likelihoods.__all__ if name not in ("Hyper", "Likelihood")]
        methods = discover()
        width = max(map(len, methods))
        lines = [f"{name:<{width}}  {summary(method)}" for name, method in methods.items()]
        lines += ["", " " * width + "  " + "  ".join(known)]
        for name, method in methods.items():
            marks = ("yes" if k in method.likelihoods else "-" for k in known)
            lines.append(
                f"{name:<{width}}  " + "  ".join(f"{m:^{len(k)}}" for m, k in zip(marks, known, strict=True)).rstrip()
            )
        content = {
            n: {"summary": summary(m), "starts_from": m.starts_from, "likelihoods": list(m.likelihoods)}
            for n, m in methods.items()
        }
        common.show(content, "\n".join(lines))
