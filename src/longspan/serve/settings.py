"""How the server is set up, apart from the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longspan.serve.limits import RequestLimits

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ROOT_PATH = re.compile(r"(/[^/?#\s]+)*")
_KEY = re.compile(r"[^\s\x00-\x1f\x7f]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Of the HTTP face.

    Attributes:
        model_names: by which clients may ask; the first is told to them.
        api_keys: any of them will do; none: everybody may ask.
        root_path: the prefix that a proxy in front takes off.
        request_timeout_s: the longest that a request may take; None for no limit.
        body_timeout_s: the longest that a request's body may take to come.
        max_total_body_bytes: of the bodies of all open requests together.
        max_header_bytes: of a request's line and headers together.
        shutdown_timeout_s: how long requests under way may go on after SIGTERM.
        keep_alive_s: how long a stream may be silent before a comment is sent. For so long its status is open, too: a
            failure before it has one of its own.
        reader_timeout_s: a client that reads nothing of its stream for so long is taken for gone.
        max_num_queued_reqs, max_num_queued_tokens: of `EngineSetup`; what could never wait is refused.
        metrics_prefix: of the metrics' names, with its colon.
        tracer: gets one span per request for text; None for no tracing.

    Raises:
        ValueError: for a value that cannot work; keys are not repeated in it.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    root_path: str = ""
    request_timeout_s: float | None = None
    body_timeout_s: float = 60.0
    max_total_body_bytes: int = 2**28
    max_header_bytes: int = 64 * 1024
    shutdown_timeout_s: float = 30.0
    keep_alive_s: float = 10.0
    reader_timeout_s: float = 60.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    metrics_prefix: str = "longspan:"
    tracer: Tracer | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"--served-model-name must not be empty, but {list(self.model_names)} given")
        if not all(_KEY.fullmatch(key) for key in self.api_keys):
            raise ValueError("an --api-key is empty or has spaces in it: give one that a header can carry")
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(f"--root-path must be empty or like /some/prefix, but {self.root_path!r} given")
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ValueError(
                f"--metrics-prefix must be letters, digits, _ and :, such as vllm:, but {self.metrics_prefix!r} given"
            )

    def check_queue(self, num_prompts: int, num_tokens: int) -> None:
        """Whether the prompts of one request, which have so many tokens together, find place in a queue that is empty.

        Raises:
            ValueError: if they do not: to come again later would not help.
        """
        most_prompts, most_tokens = self.max_num_queued_reqs, self.max_num_queued_tokens
        if most_prompts is not None and num_prompts > most_prompts:
            raise ValueError(
                f"{num_prompts} prompts never fit into the queue, which has room for {most_prompts} "
                "(--max-num-queued-reqs): send several requests"
            )
        if most_tokens is not None and num_prompts > 1 and num_tokens > most_tokens:
            raise ValueError(
                f"prompts of {num_tokens} tokens never fit into the queue together, which has room for {most_tokens} "
                "(--max-num-queued-tokens): send several requests"
            )
