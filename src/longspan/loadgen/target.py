"""The server that is asked, and how requests are put to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from longspan.loadgen.prompts import PromptMaker
from longspan.loadgen.workload import Ask

_KINDS = ("/chat/completions", "/completions")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and one of its endpoints.

    Attributes:
        base_url: the part before the endpoint.
        endpoint: the path; ends in /completions or /chat/completions, which says what prompts are.
        ignore_eos: answers go on to their full length; a field of vLLM's.
        continuous_usage_stats: ask for the usage with every chunk; a field of vLLM's.
        extra_body: further fields of every request.
        timeout_s: a request that takes longer has failed.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = False
    continuous_usage_stats: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        """Checks the address.

        Raises:
            ValueError: when it is none, or the endpoint is of no kind that we know.
        """
        if urlsplit(self.base_url).scheme not in ("http", "https") or not urlsplit(self.base_url).hostname:
            raise ValueError(f"--base-url must be like http://127.0.0.1:8000, but {self.base_url!r} given")
        if not self.endpoint.startswith("/") or not self.endpoint.endswith(_KINDS):
            raise ValueError(
                f"--endpoint must be a path that ends in {' or '.join(_KINDS)}, but {self.endpoint!r} given"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"--request-timeout must be above 0, but {self.timeout_s} given")

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + self.endpoint

    @property
    def models_url(self) -> str:
        """Where the server lists its models."""
        return self.base_url.rstrip("/") + self.endpoint.removesuffix(_KINDS[self._kind]) + "/models"

    def bodies(self, asks: Sequence[Ask], prompts: PromptMaker) -> Iterator[bytes]:
        """The requests in JSON, in order, made one by one."""
        for index, ask in enumerate(asks):
            yield msgspec.json.encode(self._body(index, ask, prompts))

    def _body(self, index: int, ask: Ask, prompts: PromptMaker) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if _KINDS[self._kind] == "/completions":
            body |= {"prompt": prompts.token_ids(index, ask), "max_tokens": ask.output_len}
        else:
            message = {"role": "user", "content": prompts.words(index, ask)}
            body |= {"messages": [message], "max_completion_tokens": ask.output_len}
        options = {"include_usage": True}
        if self.continuous_usage_stats:
            options["continuous_usage_stats"] = True
        body |= {"stream": True, "stream_options": options}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.extra_body}

    @property
    def _kind(self) -> int:
        return next(number for number, ending in enumerate(_KINDS) if self.endpoint.endswith(ending))
