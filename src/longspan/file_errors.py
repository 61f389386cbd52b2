"""Problems of files that users give, in words, with a remedy."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from pathlib import Path


def unread(path: Path | str, error: Exception) -> str:
    """Return the problem of a file of the user that cannot be read, with the remedy, as `'x' cannot be read (...)`."""
    if isinstance(error, UnicodeDecodeError):
        reason = f"byte {error.start} is not UTF-8"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    match error:
        case FileNotFoundError() | NotADirectoryError():
            remedy = "check the path"
        case IsADirectoryError():
            remedy = "give a file instead of a folder"
        case PermissionError():
            remedy = "change its permissions, or give another file"
        case tomllib.TOMLDecodeError() | json.JSONDecodeError():
            remedy = "correct that part of it"
        case _:
            remedy = "give another file"
    return f"{str(path)!r} cannot be read ({reason}): {remedy}"


def unwritten(path: Path | str, error: OSError) -> str:
    """Return the problem of a file that cannot be written, with the remedy."""
    match error:
        case FileNotFoundError() | NotADirectoryError():
            remedy = "make its folder, or give another file"
        case IsADirectoryError():
            remedy = "give a file instead of a folder"
        case PermissionError():
            remedy = "change the permissions, or give another file"
        case _ if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            remedy = "free some space, or give a file on another disk"
        case _:
            remedy = "give another file"
    return f"{str(path)!r} cannot be written ({error.strerror}): {remedy}"


def why_unwritable(path: Path) -> str | None:
    """Return the problem, with the remedy, of a file that cannot be written after a run, or None."""
    folder, number = path.absolute().parent, 0
    if not folder.is_dir():
        number = errno.ENOENT
    elif path.is_dir():
        number = errno.EISDIR
    elif not os.access(path if path.exists() else folder, os.W_OK):
        number = errno.EACCES
    return unwritten(path, OSError(number, os.strerror(number))) if number else None
