"""Models of the Hugging Face hub: their files are fetched once, and every failure has its own remedy."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]  # of its HTTP library

from longspan.model.files import ModelError, one_line

HUB_ERRORS = (TransportError, EntryNotFoundError, ValueError, KeyError, OSError)
"""The errors of `huggingface_hub` for names, answers, connections, tokens and files."""
_WEIGHTS = ("model*.safetensors", "*.safetensors", "*.bin")
"""The first pattern with a file has the weights. Files of later patterns are copies in other formats or folders."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
_LOG_IN = "set HF_TOKEN, or run: hf auth login"
_NO_TOKEN = 401
_REFUSALS: dict[type | int, tuple[str, ...]] = {
    GatedRepoError: (
        "model {model} is gated, and the hub gives no access",
        "accept its terms at {page}, then {log_in}",
        "request access for your account at {page}. A fine-grained token must be allowed to read gated repositories",
    ),
    RepositoryNotFoundError: (
        "model {model} is no path on this machine, and the hub shows no repository of this name",
        "check the name and the path. If it is private, it needs a token: {log_in}",
        "check the name and the path, and that your token may read it if it is private",
    ),
    RevisionNotFoundError: ("the repository of model {model} has no branch main", "see {page}, and choose another"),
    DisabledRepoError: ("the hub has disabled model {model}", "see {page}, and choose another"),
    EntryNotFoundError: ("the repository of model {model} lacks a needed file", "see its files at {page}"),
    _NO_TOKEN: (
        "the hub does not accept the token for model {model} (401)",
        "make a new one at {hub}/settings/tokens, then {log_in}",
    ),
    403: ("the hub denies access to model {model} (403)", "check your rights at {page}, and those of your token"),
    429: ("the hub limits requests for model {model} (429)", "wait some minutes. For a higher limit, {log_in}"),
}
"""The problem of each refusal, its remedy without a token and, if another, the one with a token."""
_NO_ANSWER = ("the hub failed to answer for model {model} ({status})", "try again later, or give a folder")
_FAILURES = {
    "TimeoutException": (
        "the hub did not answer in time for model {model}",
        "try again, or set HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT to more seconds",
    ),
    "ProxyError": ("the proxy refuses the connection for model {model}", "check HTTPS_PROXY and NO_PROXY"),
    "ConnectError": (
        "no connection to {hub} for model {model} ({error})",
        "check the network, give a folder, or check the path",
    ),
}
"""The keys are names of its HTTP library's errors, whose package depends on the version of `huggingface_hub`."""
_LOST = ("the connection was lost while model {model} was fetched", "start again, which fetches the rest")
_log = logging.getLogger("longspan")


def fetch(model: str, wanted: Sequence[str], *, with_weights: bool) -> Path:
    """Return the folder of a model in the hub's cache. Files that match `wanted` are fetched if it lacks them.

    If the hub cannot be reached, or refuses, a complete copy in the cache is used, with a warning. Raise ModelError if
    there is none, with the reason and the remedy.
    """
    try:
        files = HfApi().model_info(model, timeout=constants.HF_HUB_ETAG_TIMEOUT).siblings or []
    except HUB_ERRORS as error:
        folder = _cached(model, wanted, error, with_weights=with_weights)
        _log.warning("%s: using the cached copy %s, which was not compared with the hub", _why(model, error)[0], folder)
        return folder
    if not any(file.rfilename == "config.json" for file in files):
        example = next((file.rfilename for file in files if file.rfilename.endswith(".gguf")), None)
        remedy = "choose a model in Hugging Face's format"
        if example is not None:
            remedy = f"fetch one of its GGUF files (hf download {model} {example}), and give its path"
        raise ModelError(f"the hub's repository of model {model!r} has no config.json: {remedy}")
    try:
        return _snapshot(model, wanted, with_weights=with_weights)
    except HUB_ERRORS as error:
        raise ModelError(explain(model, error)) from error


def _cached(model: str, wanted: Sequence[str], reason: Exception, *, with_weights: bool) -> Path:
    try:
        return _snapshot(model, wanted, with_weights=with_weights, offline=True)
    except HFValidationError as error:
        raise ModelError(explain(model, error)) from error
    except IncompleteSnapshotError as error:
        raise ModelError(f"{explain(model, reason)}. The cached copy lacks files") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(explain(model, reason)) from error


def _snapshot(model: str, wanted: Sequence[str], *, with_weights: bool, offline: bool = False) -> Path:
    for pattern in _WEIGHTS if with_weights else ("config.json",):
        folder = Path(snapshot_download(model, allow_patterns=[*wanted, pattern], local_files_only=offline))
        if any(folder.glob(pattern)):
            break
    return folder


def explain(model: str, error: Exception) -> str:
    """Return one line for an error of the hub: the problem and its remedy. It never has the token."""
    problem, remedy = _why(model, error)
    return f"{problem}: {remedy}"


def _why(model: str, error: Exception) -> tuple[str, str]:
    """Return the problem and its remedy."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HUB_ERRORS):
        error = error.__cause__
    if isinstance(error, HFValidationError):
        problem = f"model {model!r} is neither an existing path nor a hub id"
        return problem, "give a folder, a .gguf file, or a name such as owner/model"
    if isinstance(error, HfHubHTTPError):
        return _why_refused(model, error)
    if isinstance(error, TransportError | ConnectionError):
        return _why_unreachable(model, error)
    return _why_unwritten(model, error)


def _why_refused(model: str, error: HfHubHTTPError) -> tuple[str, str]:
    status = error.response.status_code
    has_token = get_token() is not None
    # Without a token, the hub answers 401 for names of no repository as well.
    kind = next(
        (kind for kind in _REFUSALS if isinstance(kind, type) and isinstance(error, kind)),
        RepositoryNotFoundError if status == _NO_TOKEN and not has_token else status,
    )
    problem, *remedies = _REFUSALS.get(kind, _NO_ANSWER)
    remedy = remedies[-1] if has_token else remedies[0]
    hub = constants.ENDPOINT
    names = {"model": repr(model), "status": status, "hub": hub, "page": f"{hub}/{model}", "log_in": _LOG_IN}
    return problem.format_map(names), remedy.format_map(names)


def _why_unreachable(model: str, error: Exception) -> tuple[str, str]:
    if isinstance(error, OfflineModeIsEnabled):
        problem = f"model {model!r} cannot be fetched, since HF_HUB_OFFLINE is set"
        return problem, "unset it, copy the model to this machine and give its folder, or check the path"
    names = [kind.__name__ for kind in type(error).__mro__]
    problem, remedy = next((_FAILURES[name] for name in names if name in _FAILURES), _LOST)
    return problem.format(model=repr(model), hub=constants.ENDPOINT, error=one_line(error)), remedy


def _why_unwritten(model: str, error: Exception) -> tuple[str, str]:
    number = error.errno if isinstance(error, OSError) else None
    cache = f"the hub's cache {constants.HF_HUB_CACHE}"
    if number in _FULL:
        return f"{cache} has no space for model {model!r}", "free some space, or set HF_HOME to another disk"
    if number in _NOT_WRITABLE:
        return f"{cache} cannot be written to for model {model!r}", "set HF_HOME to another folder"
    if isinstance(error, UnicodeError):
        return f"the token for model {model!r} has letters that no token has", "check HF_TOKEN"
    if isinstance(error, ValueError | KeyError):
        return f"{constants.ENDPOINT} does not answer as a hub for model {model!r}", "check HF_ENDPOINT and proxies"
    if isinstance(error, LocalEntryNotFoundError):
        return f"{cache} has no whole copy of model {model!r}", "connect to the network, or give a folder"
    return f"model {model!r} could not be fetched from the hub ({one_line(error)})", "try again, or give a folder"
