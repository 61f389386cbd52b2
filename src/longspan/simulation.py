"""The simulator's Python API: read the files that an experiment names, and run it.

    from longspan import ClusterSpec, WorkloadSpec, simulate

    cluster = ClusterSpec(hardware="a100-sxm-80g", hosts=2, gpus_per_host=8)
    result = simulate("llama-3-8b", cluster, WorkloadSpec(workload="medium", rate=2.0, num_requests=100))
    print(result.summary()["ttft_p99_s"])

The simulator itself, `longspan.sim`, is pure: it reads no files and fetches nothing from the hub.
"""

from __future__ import annotations

import json
import logging
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from longspan.core.options import SchedulingArgs
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.catalog import Device
from longspan.cost.config_fields import stored_formats, stored_kv
from longspan.cost.precision import Precision
from longspan.cost.profile import Profile
from longspan.csa_file import csa_settings
from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.model.files import config_dtype
from longspan.policy.registry import check_sparse, policy_class
from longspan.sim.experiment import Experiment
from longspan.sim.resolve import computed_experiment, measured_experiment
from longspan.sim.run import Result
from longspan.sim.spec import ClusterSpec, Dtype, Faults, HardwareSpec
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from longspan.extras.timeline import Timeline

_log = logging.getLogger("longspan")


def simulate(
    model: str,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    scheduling: SchedulingArgs = SchedulingArgs(),
    faults: Faults = Faults(),
    timeline: Timeline | None = None,
) -> Result:
    """Serve a workload on a simulated cluster, with the policies of the real engine.

    Args:
        model: a name such as llama-3-8b, a folder with a config.json, or a hub id.
        timeline: records the work of every instance; see `longspan.extras.timeline`.

    Returns:
        The outcome of each request; `Result.summary` has percentiles and rates. Times are seconds of a virtual clock.
            Equal arguments give equal numbers.

    Raises:
        ValueError: for invalid values, or files that cannot be read.
    """
    experiment = make_experiment(model, cluster, scheduling, faults)
    for warning in experiment.resolved.warnings:
        _log.warning("%s", warning)
    return experiment.run(make_workload(workload), timeline.observers(experiment.cost) if timeline else None)


def make_experiment(
    model: str, cluster: ClusterSpec, scheduling: SchedulingArgs = SchedulingArgs(), faults: Faults = Faults()
) -> Experiment:
    """Build an experiment, which can run several workloads and policy options.

    Raises:
        ValueError: for unknown names, a model that does not fit the devices, or an unreadable or mismatched profile.
    """
    check_sparse(scheduling.policy, scheduling.all_policy_options())
    scheduling = replace(scheduling, csa=csa_settings(scheduling.csa, model))
    if cluster.profile is None:
        sizes = read_architecture(model, cluster)
        return computed_experiment(sizes, read_device(cluster.hardware), cluster, scheduling, faults)
    profile = read_profile(cluster.profile)
    key = profile.profile_key
    if _last_name(model) != _last_name(key.model):  # the profiled machine may use another folder
        problem = f"is of model {key.model}, but {model} given: give that, or a profile of {model}"
        raise ParameterError("profile", problem, cluster.profile)
    sizes = read_architecture(model, HardwareSpec(dtype=cast("Dtype", key.dtype)))
    return measured_experiment(sizes, profile, cluster, scheduling, faults)


def each_policy(scheduling: SchedulingArgs) -> list[SchedulingArgs]:
    """Return the scheduling options of each policy in the comma-separated `policy`.

    Each policy gets the policy options that it has, such as `exchange`.

    Raises:
        ValueError: for an unknown or repeated policy, or an option that none of several policies has.
    """
    names = [name.strip() for name in scheduling.policy.split(",")]
    if len(names) == 1:
        return [scheduling]
    if len(set(names)) < len(names):
        problem = f"{scheduling.policy} repeats a policy: name each of them once"
        raise ParameterError("policy", problem, scheduling.policy)
    option_names = {name: {field.name for field in fields(policy_class(name).Options)} for name in names}
    options = scheduling.all_policy_options()
    for key in options:
        if not any(key in names_of_policy for names_of_policy in option_names.values()):
            every = ", ".join(sorted(set().union(*option_names.values())))
            problem = f"{key}: none of {', '.join(names)} has it: their options are {every}"
            raise ParameterError("policy_options", problem, key)
    common = replace(scheduling, exchange="auto", layout="auto", fractions=None)
    given = {name: {key: options[key] for key in options if key in option_names[name]} for name in names}
    return [replace(common, policy=name, policy_options=given[name]) for name in names]


def read_architecture(model: str, spec: HardwareSpec = HardwareSpec()) -> Architecture:
    """Read a model's sizes by its name in the catalog, from its folder or config.json, or from the hub.

    Raises:
        ValueError: if there is no config.json, or an invalid one.
    """
    config, dtype = _read_config(model), resolved_dtype(model, spec.dtype)
    kv = stored_kv(config) if spec.kv_cache_dtype == "auto" else spec.kv_cache_dtype
    weights = ffn = "bfloat16" if dtype == "auto" else dtype
    if spec.dtype == "auto" and (stored := stored_formats(config)) is not None:
        weights, ffn = stored
    precision = Precision.of(weights, ffn=spec.ffn_dtype or ffn, kv=kv)
    sizes = from_config(config, name=model, precision=precision)
    if not spec.expert_parallel:
        return sizes
    if sizes.experts is None:
        raise ParameterError("expert_parallel", f"is for mixtures of experts, but {model} has none: leave it out", True)
    return replace(sizes, experts=replace(sizes.experts, are_whole=True))


def read_device(hardware: str | None) -> Device:
    """Read a device by its name in the catalog, or from a TOML or JSON file with the fields of hardware.toml.

    Raises:
        ParameterError: for an unknown name, an unreadable file, or an invalid field.
    """
    if hardware is None:
        raise ParameterError("hardware", "must be a name that longspan estimate knows, if no `profile` is given")
    path = Path(hardware).expanduser()
    if hardware in (known := catalog.names("hardware")):
        return catalog.device(hardware)
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".json"):
        from longspan.names import choices  # noqa: PLC0415 - an error

        problem = f"{hardware!r} is unknown: {choices(hardware, known)}, or give a .toml or .json file with its fields"
        raise ParameterError("hardware", problem, hardware)
    from longspan.cost.user_device import user_device  # noqa: PLC0415 - most devices are known

    try:
        text = path.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ParameterError("hardware", unread(path, error), hardware) from None
    if not isinstance(fields, dict):
        raise ParameterError("hardware", f"{hardware!r} must be a JSON object with the fields of a device", hardware)
    return user_device(path.stem, fields, hardware)


def resolved_dtype(model: str, dtype: Dtype) -> Dtype:
    """Resolve `auto` to the precision in the model's config, as the engine does. Without one, keep `auto`."""
    stated = config_dtype(_read_config(model)) if dtype == "auto" else None
    if stated is None:
        return dtype
    return "float32" if stated in {"float32", "float64"} else "bfloat16"


def _read_config(model: str) -> dict[str, Any]:
    if model in catalog.names("models"):
        return catalog.model_config(model)
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        file = _fetched(model)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ParameterError("model", unread(file, error), model) from None
    if not isinstance(config, dict):
        raise ParameterError("model", f"{str(file)!r} must be a JSON object, as a model's config.json is", model)
    return config


def _fetched(model: str) -> Path:
    known = f"known are {', '.join(catalog.names('models'))}, folders with a config.json, and Hugging Face hub ids"
    if model.count("/") != 1 or model.startswith(("/", ".", "~")):
        from longspan.names import closest  # noqa: PLC0415 - an error

        similar = closest(model, catalog.names("models"))
        meant = "" if similar is None else f", is {similar} meant?"
        raise ParameterError("model", f"{model!r} is unknown{meant}: choose another ({known})", model)
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only for models without local files

    from longspan.model.hub import HUB_ERRORS, explain  # noqa: PLC0415

    try:
        return Path(hf_hub_download(model, "config.json"))
    except HUB_ERRORS as error:
        raise ParameterError("model", f"{explain(model, error)} ({known})", model) from error


def read_profile(path: Path) -> Profile:
    """Read a profile. Raise ParameterError for a file that cannot be read."""
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError("profile", unread(path, error), path) from None


def _last_name(model: str) -> str:
    path = Path(model).expanduser()
    folder = path.resolve() if path.is_dir() else path.parent if path.is_file() else path
    return folder.name.lower()
