"""Kept documents: their texts and KV under a name on disk, so that later runs answer the next question at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from longspan.cli.documents import Content
from longspan.cli.options import start
from longspan.cli.outputs import note
from longspan.core.options import Option
from longspan.errors import ParameterError
from longspan.model.files import cache_root, write_file

if TYPE_CHECKING:
    from longspan.args import EngineArgs
    from longspan.llm import LLM

KeepArgument = Annotated[
    str | None, Option("Keep the KV of the files on disk by this name, for the next question.", metavar="NAME")
]
HOST_GIB, DISK_GIB = 4.0, 4.0
"""Memory and disk for the KV of a kept document, if not given. These hold 93,000 tokens of the default model, or
32,000 tokens of Llama 3 8B. A longer document is answered, but not kept. A kept document gets the disk that it has."""
_SAVE_S = 600.0
"""Seconds in which the KV of a document is written after its first answer."""
_RECORD = "document.json"


def folder_of_documents() -> Path:
    return cache_root() / "documents"


def _default_gib(folder: Path) -> float:
    """Return the disk for a document whose KV is not stored: `DISK_GIB`, or half of the free space if that is less."""
    return min(DISK_GIB, disk_usage(folder).free / 2**31)


class Kept:
    """A name with its document. Once the given files are saved, they replace other content of the name.

    Args:
        given: the content for the name. None to use the stored content.
        fixed: options that change the content, by name. Stored content has its own, so that they must be None then.

    Attributes:
        content: the content to put before the question.

    Raises:
        ParameterError: the name has other characters than a file's name, or is unknown although no file is given.
    """

    def __init__(self, name: str, given: Content | None, fixed: Mapping[str, object] = MappingProxyType({})) -> None:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ParameterError("keep", f"must be letters, digits, '.', '-' and '_', but {name!r} given", name)
        self.name, self._folder = name, folder_of_documents() / name
        self._unfinished = self._folder.with_name(f".{name}.unfinished")
        self._saved: tuple[str, Sequence[int], int] | None = None
        self._is_stale = False  # the folder has the KV of other content, or of content that is not known
        for option, value in fixed.items():
            if given is None and value is not None:
                raise ParameterError(option, "needs the files, whose kept KV depends on it: give them, too", value)
        stored = self._stored()
        if given is None and stored is None:
            raise ParameterError("keep", f"{name!r} is not stored: give the files before the question", name)
        if given is not None and stored is not None and given.to_json() != stored.to_json():
            note(f"the content of {name} has changed: its KV is computed again")
            self._is_stale = True
        content = given or stored
        assert content is not None, "checked above"
        self.content = content

    @contextmanager
    def start(self, model: str, engine: EngineArgs, *, seed: int | None) -> Iterator[LLM]:
        """Start an engine with the tiers that the document needs. Raise ParameterError if the name is in use."""
        with ExitStack() as stack:
            given = self._engine(engine)
            stack.callback(self._remove_unsaved)
            try:
                llm = stack.enter_context(start(model, given, seed=seed))
            except ParameterError as error:
                if error.parameter != "disk_kv_dir" or engine.disk_kv_dir is not None:
                    raise
                raise ParameterError("keep", f"{self.name!r} cannot be used: {error.problem}", self.name) from None
            yield llm

    def _engine(self, engine: EngineArgs) -> EngineArgs:
        if engine.disk_kv_dir is not None:
            raise ParameterError("disk_kv_dir", "is set by `keep`: leave one of them out", engine.disk_kv_dir)
        if engine.executor == "ray":
            problem = (
                "is not possible with `executor` ray, whose hosts keep KV on their own disks: leave one of them out"
            )
            raise ParameterError("keep", problem, self.name)
        if self._is_stale:
            self._prepare_replacement()
        self._present.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files contain the user's text
        return replace(
            engine,
            host_kv_gib=engine.host_kv_gib or HOST_GIB,
            disk_kv_gib=engine.disk_kv_gib or max(_default_gib(self._present), self._stored_gib()),
            disk_kv_dir=str(self._present),
        )

    @property
    def _present(self) -> Path:
        """The folder of the content, which is a new one until it replaces other content."""
        return self._unfinished if self._is_stale else self._folder

    def check(self, llm: LLM, prompt: Sequence[int]) -> None:
        """Note if the KV was kept with settings under which this prompt cannot use it."""
        from longspan.runtime import kept_kv  # noqa: PLC0415 - needed for kept documents only
        from longspan.runtime.disk_pool import name_of_kv  # noqa: PLC0415

        name = name_of_kv(llm.service.files, llm.engine.config.block_size)
        root = kept_kv.record(self._present / name).get("root")
        if root not in (None, kept_kv.root_of(llm.engine.config, llm.service.setup.policy, len(prompt))):
            problem = f"{self.name} was kept with other settings of sparse attention or rotary embeddings"
            remedy = f"to keep it with these, first run longspan cache drop documents {self.name}"
            note(f"{problem}: its KV is computed again, and not kept ({remedy})")

    def save(self, llm: LLM, tokens: Sequence[int]) -> None:
        """Store the content, whose `tokens` all prompts begin with. Wait until the KV of ended requests is on disk."""
        from longspan.runtime.disk_pool import name_of_kv  # noqa: PLC0415 - needed for kept documents only

        if not llm.engine.settle(_SAVE_S):
            note(f"the KV of {self.name} is not on disk after {_SAVE_S:g} s")
        block_size = llm.engine.config.block_size
        write_file(self._present / _RECORD, self.content.to_json())
        self._saved = name_of_kv(llm.service.files, block_size), tokens, block_size

    def finish(self, model: str) -> None:
        """Make the saved KV of the content read-only. The engine has ended."""
        from longspan.runtime import kept_kv  # noqa: PLC0415 - needed for kept documents only

        if self._saved is None:
            return
        name, tokens, block_size = self._saved
        try:
            if self._is_stale:
                kept_kv.replace(self._folder, self._unfinished)
                self._is_stale = False
            folder = self._folder / name
            if kept_kv.is_kept(folder):
                return
            num_bytes = kept_kv.keep(folder, tokens, block_size, model=model)
            total, free = _num_bytes(folder_of_documents()), disk_usage(folder).free
            if total > free:
                kept_kv.drop_model(folder)
        except kept_kv.KvInUseError as error:
            note(f"the KV of {self.name} is not kept yet: {error}")
            return
        if num_bytes is None:
            problem = f"the KV of {self.name} is not kept: it was not computed, or the tiers are too small for it"
            note(f"{problem}. Allow more by --host-kv-gib and --disk-kv-gib")
        elif total > free:
            sizes = f"kept documents would take {total / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB would stay free"
            note(f"the KV of {self.name} is not kept: {sizes}. Drop some by longspan cache drop documents NAME")
        else:
            note(f"kept {self.name}: {len(tokens):,} tokens, {num_bytes / 2**20:,.0f} MiB of KV")

    def _stored(self) -> Content | None:
        try:
            return Content.of_json((self._folder / _RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            note(f"the record of {self.name} cannot be read ({error}), so its KV is computed again")
            self._is_stale = True
            return None

    def _stored_gib(self) -> int:
        """Return the size of the stored KV, rounded up."""
        return math.ceil(_num_bytes(self._present) / 2**30)

    def _remove_unsaved(self) -> None:
        """Remove the new content of a failed run, unless another process uses the folder."""
        from longspan.runtime import kept_kv  # noqa: PLC0415 - needed for kept documents only

        if self._is_stale and self._saved is None:
            with suppress(OSError, kept_kv.KvInUseError):
                kept_kv.drop(self._unfinished)

    def _prepare_replacement(self) -> None:
        """Remove the rest of an earlier replacement. Raise ParameterError if another process uses the name."""
        from longspan.runtime import kept_kv  # noqa: PLC0415 - needed for kept documents only

        try:
            kept_kv.check_unused(self._folder)
            if self._unfinished.exists():
                kept_kv.drop(self._unfinished)
        except kept_kv.KvInUseError as error:
            raise ParameterError("keep", f"{self.name!r} cannot be replaced: {error}", self.name) from None


def _num_bytes(folder: Path) -> int:
    """Return the size of all files of a folder. Other processes may add and remove files."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            num_bytes += path.stat().st_size if path.is_file() else 0
    return num_bytes
