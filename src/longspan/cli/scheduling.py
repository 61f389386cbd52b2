"""The options of every verb that schedules, on machines that are there or not: who decides, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from longspan.core.config import Limits
from longspan.core.options import PromptExchange, PromptLayout, key_values

_scheduling = partial(typer.Option, rich_help_panel="Scheduling and memory")
SHARING = ("exchange", "layout", "fractions")
"""Options of policies that have flags of their own."""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """See the module."""

    policy: Annotated[
        str,
        _scheduling(
            help="Who decides the steps: auto, chunked, context, runahead, tetris, fixed-sp, loongserve or "
            "loongserve-disagg."
        ),
    ] = "auto"
    exchange: Annotated[
        PromptExchange,
        _scheduling(help="How queries, keys and values of a shared prompt travel; auto chooses per step."),
    ] = "auto"
    layout: Annotated[PromptLayout, _scheduling(help="How a shared prompt is dealt.")] = "auto"
    fractions: Annotated[
        str | None,
        _scheduling(
            metavar="F,F,...",
            help="Of a contiguous layout, what part each instance gets.",
            show_default="as the policy has it",
        ),
    ] = None
    policy_option: Annotated[
        list[str] | None,
        _scheduling("--policy-option", "-o", metavar="KEY=VALUE", help="An option of the policy; repeatable."),
    ] = None
    max_model_len: Annotated[
        int | None,
        _scheduling(help="Longest prompt plus output, in tokens.", show_default="what model and KV pools allow"),
    ] = None
    block_size: Annotated[int, _scheduling(help="Tokens per KV block.")] = 256
    max_num_batched_tokens: Annotated[int, _scheduling(help="Most tokens of one step on one instance.")] = 2048
    max_num_seqs: Annotated[int, _scheduling(help="Most requests that run at once on one instance.")] = 128
    num_gpu_blocks_override: Annotated[
        int | None,
        _scheduling(help="KV blocks of each instance, whatever memory there is.", show_default="what memory holds"),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        _scheduling(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV of prompts that begin alike."
        ),
    ] = True
    async_scheduling: Annotated[
        bool,
        _scheduling("--async-scheduling/--no-async-scheduling", help="Plan and send a step while the last one runs."),
    ] = True

    def policy_options(self) -> dict[str, str]:
        """All options of the policy, also those with flags of their own.

        Raises:
            ValueError: for one that is given twice, or not of the form key=value.
        """
        options = key_values(self.policy_option or ())
        for name in SHARING:
            value = getattr(self, name)
            if value not in (None, "auto"):
                if name in options:
                    raise ValueError(f"--{name} {value} and -o {name}={options[name]}: give one of them")
                options[name] = value
        return options

    def limits(self) -> Limits:
        """The bounds of a step.

        Raises:
            ValueError: for one that is not possible.
        """
        return Limits(max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)
