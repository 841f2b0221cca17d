"""Out of Python, or into a small device: what a posterior becomes where it is used.

    one_network    one network out of a posterior over active weights, without draws
    export         the whole prediction as one file, for torch alone or for an ONNX runtime

Called by people and by `caveat export`.
"""

from caveat.deploy.export import export
from caveat.deploy.one_network import deploy

__all__ = ["deploy", "export"]
