"""Where a prepared model lies on disk, and the error for what a user can get wrong about one."""

from dataclasses import dataclass
from pathlib import Path


class ModelError(ValueError):
    """The user asked for a model that cannot be served; the message is one line with the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that is ready to be mapped by workers on this host.

    `config_dir` is the folder that AutoConfig reads, `weights` the module-layout safetensors file of the store,
    `tokenizer_dir` is None when the model comes without tokenizer files, `dtype` is a key of `DTYPES`.
    """

    name: str
    config_dir: Path
    weights: Path
    tokenizer_dir: Path | None
    dtype: str
    trust_remote_code: bool = False


def one_line(error: BaseException) -> str:
    """The kind and the beginning of the message of someone else's error, for use within a line of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
