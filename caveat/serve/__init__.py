"""A posterior as a small HTTP service: a page to try one input, predictions as json, a card of what answers.

    inputs      what is sent: rows of numbers, or of a table's cells by the names of columns
    service     what is answered: inputs are checked, predicted and put in words; nothing of the training data is there
    batching    requests that wait while others are predicted go through the network together
    app         the routes, by FastAPI: `/`, `/predict`, `/health` and `/card`

Called by `caveat serve` and by people who mount `app_of(Service.of(posterior))` in a server of their own.
"""

from caveat.serve.app import app_of
from caveat.serve.batching import Batcher, TooManyRequests
from caveat.serve.inputs import InputFault
from caveat.serve.service import Service

__all__ = ["Batcher", "InputFault", "Service", "TooManyRequests", "app_of"]
