"""Models and clusters for verbs that run no model: by known names, a folder, or the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.cli.sheets import HardwareOptions
    from longspan.cost.architecture import Architecture
    from longspan.cost.cluster import Devices

BYTES = {"auto": 2.0, "bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0}


def architecture(model: str, *, dtype: str = "auto", ffn_dtype: str | None = None) -> Architecture:
    """A model by a name of `longspan estimate`, its folder or config.json, or a hub id.

    Raises:
        ValueError: when there is none, or its config.json cannot be used.
    """
    from longspan.cost import catalog  # noqa: PLC0415 - other verbs need none of it
    from longspan.cost.architecture import from_config  # noqa: PLC0415

    config = catalog.model_config(model) if model in catalog.names("models") else _read(model)
    ffn_bytes = None if ffn_dtype is None else BYTES[ffn_dtype]
    return from_config(config, name=model, bytes_per_element=BYTES[dtype], ffn_bytes=ffn_bytes)


def cluster_of(hardware: str, gpus_per_host: int, hosts: int, sheets: HardwareOptions) -> Devices:
    """Devices by the flags of these verbs.

    Raises:
        ValueError: when the link is given twice, or for what `Devices` refuses.
    """
    from longspan.cost.cluster import Devices  # noqa: PLC0415

    link, link_gbytes_per_s = sheets.link, sheets.link_gbytes_per_s
    if link is not None and link_gbytes_per_s is not None:
        raise ValueError(f"--link {link} and --link-gbytes-per-s {link_gbytes_per_s:g} both give its speed: give one")
    speed = None if link_gbytes_per_s is None else link_gbytes_per_s * 1e9
    return Devices(hardware=hardware, gpus_per_host=gpus_per_host, hosts=hosts, link=link, link_bytes_per_s=speed)


def _read(model: str) -> dict[str, Any]:
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        file = _fetched(model)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must be a JSON object, as a model's config.json is")
    return config


def _fetched(model: str) -> Path:
    from longspan.cost.catalog import names  # noqa: PLC0415

    known = f"known are {', '.join(names('models'))}, folders with a config.json, and Hugging Face hub ids"
    if model.count("/") != 1 or model.startswith(("/", ".", "~")):
        raise ValueError(f"unknown model {model!r}: {known}")
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only for models that are not here
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model {model!r} could not be fetched from the Hugging Face hub ({reason}): {known}"
        ) from error
