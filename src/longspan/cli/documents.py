"""Documents that questions refer to: the texts of files and folders, and their form in a prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from longspan.cli.inputs import STDIN, TOO_LONG, read_text
from longspan.cli.outputs import note
from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.limits import MAX_TEXT_BYTES

_EXTRA = "pip install 'longspan[documents]'"


@dataclass(frozen=True, kw_only=True)
class Document:
    """The text of a file. A citation names the file and counts lines and characters of this text."""

    name: str
    text: str

    @property
    def head(self) -> str:
        """The text before the document's own text in a prompt."""
        return f"Document {self.name}:\n\n"


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a conversation before its first question.

    Attributes:
        chat_template: a Jinja template instead of the model's own.
    """

    documents: Sequence[Document] = ()
    system: str | None = None
    chat_template: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Content:
        fields = json.loads(text)
        documents = [Document(**document) for document in fields.pop("documents")]
        return cls(documents=documents, **fields)


def in_prompt(documents: Sequence[Document], question: str) -> str:
    """Return the documents, and the question after them, as the text of one turn."""
    return "".join(f"{document.head}{document.text}\n\n" for document in documents) + question


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Read files, and the text files of folders in the order of their names. The path `-` is stdin.

    Raises:
        ValueError: a path cannot be read or has no text, or all texts together are longer than `MAX_TEXT_BYTES`.
    """
    documents, num_chars = list[Document](), 0
    for path in paths:
        for document in _in_folder(path) if path.is_dir() else (_read(path),):
            documents.append(document)
            num_chars += len(document.text)
            if num_chars > MAX_TEXT_BYTES:
                raise ValueError(f"the text of all files together {TOO_LONG}: give fewer files")
    return documents


def _read(path: Path) -> Document:
    reader = _READERS.get(path.suffix.lower())
    text = read_text(path, "file") if reader is None else reader(path)
    name = "stdin" if str(path) == STDIN else str(path)
    if not text.strip():
        raise ValueError(f"{name} has no text: give a file that has some")
    return Document(name=name, text=text)


def _in_folder(folder: Path) -> Iterator[Document]:
    """Yield the files of a folder and its folders that contain text, except hidden files and folders."""
    num_read, skipped = 0, list[str]()
    for path in _files_in(folder):
        try:
            document = _read(path)
        except ValueError as error:
            skipped.append(str(error))
            continue
        if "\0" in document.text:
            skipped.append(f"{path} is no text")
            continue
        num_read += 1
        yield document
    if not num_read:
        reason = f", such as {skipped[0]}" if skipped else ""
        raise ValueError(f"folder {str(folder)!r} has no text files{reason}: give another folder")
    if skipped:
        note(f"{len(skipped)} files of {folder} are left out: {skipped[0]}")


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, sorted by their paths. Links to folders are not followed."""
    paths = list[Path]()
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in files if not name.startswith(".")]
    return (path for path in sorted(paths) if path.is_file())


# ---------------------------------------------------------------- formats


def _pdf(path: Path) -> str:
    """Return the text of a PDF file, with an empty line between pages."""
    pypdf = _library("pypdf", path)
    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)
    except OSError as error:
        raise ParameterError("file", unread(path, error), path) from None
    except Exception as error:  # damaged files cause errors of many types
        problem = f"{str(path)!r} cannot be read as PDF ({error}): give another file"
        raise ParameterError("file", problem, path) from error


def _html(path: Path) -> str:
    """Return the text of an HTML file, without links and images."""
    html2text = _library("html2text", path)
    converter = html2text.HTML2Text(bodywidth=0)
    converter.ignore_links = converter.ignore_images = True
    text: str = converter.handle(read_text(path, "file"))
    return text


def _library(name: str, path: Path) -> Any:  # noqa: ANN401 - a module
    """Import an optional library, which an extra installs."""
    try:
        return import_module(name)
    except ImportError:
        problem = f"file {str(path)!r} needs the library {name}"
        raise ValueError(f"{problem}: install it ({_EXTRA}), or convert the file to text") from None


_READERS: dict[str, Callable[[Path], str]] = {".pdf": _pdf, ".html": _html, ".htm": _html}
