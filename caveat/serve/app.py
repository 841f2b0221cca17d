"""The routes of the service.

GET  /          a page to try one input
POST /predict   {"inputs": [row, ...]} -> {"rows": [{...}, ...]}, and "notes" on cells of a table where there are any
GET  /health    whether it answers, and how much it has
GET  /card      what answers
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from caveat.serve.batching import Batcher, TooManyRequests
from caveat.serve.inputs import InputFault, RowsRead
from caveat.serve.service import Service

__all__ = ["app_of"]

BODY_SECONDS = 30.0  # in which the body of a request must have come
LARGE = 2**16  # bytes of a body, above which it is read in a thread: others are answered meanwhile
PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class _TooLarge(ValueError):  # noqa: N818 - the name says what it is
    """A body beyond the limit."""


def app_of(service: Service, *, most_bytes: int = 16 * 2**20) -> Any:
    """The FastAPI app of a service; a body of more than `most_bytes` is refused before it is read."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import HTMLResponse, JSONResponse
        from starlette.requests import ClientDisconnect
    except ImportError as error:
        raise ImportError('a service needs its extra: pip install "caveat[serve]"') from error
    service.answers(service.posterior.example())  # what is made once is made before the first request
    app = FastAPI(title="caveat", docs_url=None, redoc_url=None, openapi_url=None)
    batcher, card, page = Batcher(service.answers, service.most_rows), service.card(), PAGE.read_text(encoding="utf-8")

    def inputs_of(body: bytes) -> RowsRead:
        return service.rows(_json(body))

    def failed(status: int, reason: str) -> JSONResponse:
        return JSONResponse({"error": reason}, status, headers=HEADERS)

    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=HEADERS)

    async def health() -> JSONResponse:
        content = {"status": "ok", "requests": batcher.requests, "batches": batcher.batches}
        return JSONResponse(content, headers=HEADERS)

    async def show_card() -> JSONResponse:
        return JSONResponse(card, headers=HEADERS)

    async def predict(request: Request) -> JSONResponse:
        try:
            body = await asyncio.wait_for(_body(request, most_bytes), BODY_SECONDS)
            inputs, notes = await asyncio.to_thread(inputs_of, body) if len(body) > LARGE else inputs_of(body)
        except _TooLarge as fault:
            return failed(413, str(fault))
        except InputFault as fault:
            return failed(422, str(fault))
        except (TimeoutError, asyncio.TimeoutError):
            return failed(408, f"the body did not come within {BODY_SECONDS:g} s")
        except ClientDisconnect:
            return failed(400, "the client left before its request was whole")  # nobody reads it
        try:
            answers = await batcher.answer(inputs)
        except TooManyRequests as fault:
            return failed(503, str(fault))
        except ValueError as error:  # the network cannot take these rows
            return failed(422, str(error))
        if not all(bool(values.isfinite().all()) for values in answers.values()):
            return failed(422, "the network's outputs for these inputs are not finite: scale the inputs down")
        rows: dict[str, Any] = {"rows": _by_row(answers, service.class_names)}
        return JSONResponse(rows | ({"notes": notes} if notes else {}), headers=HEADERS)

    # FastAPI reads the types of a route's arguments from its annotations, which are local names here.
    predict.__annotations__["request"] = Request
    for path, route, methods in (("/", index, ["GET"]), ("/health", health, ["GET"]), ("/card", show_card, ["GET"])):
        app.add_api_route(path, route, methods=methods, response_model=None)
    app.add_api_route("/predict", predict, methods=["POST"], response_model=None)
    return app


async def _body(request: Any, most_bytes: int) -> bytes:
    """The body of a request, of which no more than the limit is read."""
    too_large = _TooLarge(f"the body has more than {most_bytes:,} bytes: send fewer rows at once")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most_bytes:
        raise too_large
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most_bytes:
            raise too_large
    return bytes(content)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputFault('the body is not json: send {"inputs": [[...], ...]}') from error


def _by_row(answers: dict[str, Tensor], class_names: tuple[str, ...]) -> list[dict[str, Any]]:
    columns = {name: values.tolist() for name, values in answers.items()}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        if class_names and isinstance(row.get("label"), int):
            row["class"] = class_names[row["label"]]
        if "set_90" in row:
            row["set_90"] = _labels(row["set_90"], class_names if "class" in row else ())
    return rows


def _labels(inside: Any, class_names: tuple[str, ...]) -> Any:
    """The labels of a set, by name where they have names; of several sets a list of lists."""
    if inside and isinstance(inside[0], list):
        return [_labels(one, class_names) for one in inside]
    return [class_names[label] if class_names else label for label, yes in enumerate(inside) if yes]
