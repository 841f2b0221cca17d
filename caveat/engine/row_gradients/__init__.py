"""Row gradients: the gradient of every output of every row, for chosen weights, [rows, outputs, weights].

    J_n = d f(x_n, w) / d w   for each row n of a batch, from one forward pass and one backward pass per output

`Jacobian` is what others use. A forward pass is watched (`watched_pass`); torch functions that are known
(`function_rules`) leave a record of how their parameters are used, from which the gradient of each row is made (`uses`,
`product_uses` for linear layers and convolutions); a parameter of any other function is copied for each row
(`plan_search` decides). A `RowPass` is one forward pass, ready for cotangents. `winograd` makes 3x3 convolutions faster
on a CPU; `last_layer` needs no watched pass; `lower_triangle` sums products of such gradients. Called by the Laplace
room, by LastLayerLaplace to find its layer, and by linearised networks, for the diagonal of their curvature and where
rows are few.
"""

from caveat.engine.row_gradients.jacobian import Jacobian, NotFactoredError, Plans, RowPass, evenly, one_hot
from caveat.engine.row_gradients.last_layer import LastLayer
from caveat.engine.row_gradients.lower_triangle import add_products, is_large, mirror, split, sums_in_float32
from caveat.engine.row_gradients.product_uses import ProductUse
from caveat.engine.row_gradients.uses import ElementwiseUse
from caveat.engine.row_gradients.watched_pass import Tape

__all__ = [
    "ElementwiseUse",
    "Jacobian",
    "LastLayer",
    "NotFactoredError",
    "Plans",
    "ProductUse",
    "RowPass",
    "Tape",
    "add_products",
    "evenly",
    "is_large",
    "mirror",
    "one_hot",
    "split",
    "sums_in_float32",
]
