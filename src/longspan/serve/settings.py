"""How the server is set up, apart from the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from longspan.serve.limits import RequestLimits


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Of the HTTP face.

    Attributes:
        model_names: by which clients may ask; the first is told to them.
        api_keys: any of them will do; none: everybody may ask.
        root_path: the prefix that a proxy in front takes off.
        request_timeout_s: the longest that a request may take; None for no limit.
        shutdown_timeout_s: how long requests under way may go on after SIGTERM.
        keep_alive_s: how long a stream may be silent before a comment is sent. For so long its status is open, too: a
            failure before it has one of its own.
        reader_timeout_s: a client that reads nothing of its stream for so long is taken for gone.
        metrics_prefix: of the metrics' names, with its colon.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    root_path: str = ""
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    keep_alive_s: float = 10.0
    reader_timeout_s: float = 60.0
    metrics_prefix: str = "longspan:"
    limits: RequestLimits = field(default_factory=RequestLimits)
