"""One request over HTTP, and what became of it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import httpx2
import msgspec

from longspan.loadgen.answer import Answer, AnswerError, error_message
from longspan.loadgen.results import Answered, Failure
from longspan.loadgen.sse import SSEParser
from longspan.loadgen.target import Target

_OK = 200
_MOST_OF_A_MESSAGE = 500
# Servers close idle connections after some seconds (uvicorn: 5). One that is closed as we take it would fail a request.
_KEEPALIVE_S = 2.0


class Client:
    """Connections to a target, as many as there are requests under way.

    Proxies of the environment are not used: a benchmark would measure them. All times are the event loop's.
    """

    def __init__(self, target: Target, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._target = target
        key = {} if target.api_key is None else {"authorization": f"Bearer {target.api_key}"}
        self._http = httpx2.AsyncClient(
            headers={"content-type": "application/json", "accept-encoding": "identity", **key},
            timeout=None,  # `ask` limits the whole request
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, body: bytes, due_s: float) -> Answered | Failure:
        """Sends a request now and reads its answer to the end; `due_s` is when it should have been sent."""
        try:
            async with asyncio.timeout(self._target.timeout_s):
                return await self._stream(body, due_s)
        except TimeoutError:
            return Failure(kind="timeout", message=f"no end after {self._target.timeout_s:g} s (--request-timeout)")
        except AnswerError as error:
            return Failure(kind=error.kind, message=str(error))
        except httpx2.HTTPError as error:
            return Failure(kind=type(error).__name__, message=str(error) or "no further reason given")

    async def _stream(self, body: bytes, due_s: float) -> Answered | Failure:
        loop, parser, answer = asyncio.get_running_loop(), SSEParser(), Answer()
        async with self._http.stream("POST", self._target.url, content=body) as response:
            if response.status_code != _OK:
                text = await response.aread()
                return Failure(kind=f"HTTP {response.status_code}", message=_message(text))
            async for piece in response.aiter_raw():
                now_s = loop.time()
                for data in parser.feed(piece):
                    answer.take(data, now_s)
        return answer.answered(due_s)

    async def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            ValueError: when the server is not there or lists none.
        """
        url = self._target.models_url
        try:
            response = await self._http.get(url, timeout=30.0)
            names = [str(model["id"]) for model in msgspec.json.decode(response.content)["data"]]
        except httpx2.HTTPError as error:
            raise ValueError(f"no server answers at {url}: {error or type(error).__name__}; see --base-url") from None
        except (msgspec.DecodeError, KeyError, TypeError):
            reason = f"HTTP {response.status_code}: {_message(response.content)}"
            raise ValueError(f"{url} lists no models ({reason}); say which one by --model, or see --api-key") from None
        if not names:
            raise ValueError(f"{url} lists no models; say which one by --model")
        return names[0]


def _message(body: bytes) -> str:
    """What an error's body says, whoever wrote it."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return text[:_MOST_OF_A_MESSAGE]
    return error_message(found.get("error", found) if isinstance(found, dict) else found)[:_MOST_OF_A_MESSAGE]
