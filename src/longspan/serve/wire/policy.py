"""What may be asked of the policy while it serves, and how it is told."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from longspan.core.protocols import OptionValue, PolicySettings, SettledError, option_text
from longspan.serve.wire.errors import WireError
from longspan.serve.wire.fields import MOST, WireModel

_MOST_CHARACTERS = 4096

Given = Annotated[str, Field(max_length=_MOST_CHARACTERS)] | bool | Annotated[int, Field(ge=-MOST, le=MOST)] | float
"""An option's value: a text as the command line has it, or a number, or true or false."""


class PolicyUpdate(WireModel):
    """`POST /admin/policy`: options of the policy, by name, that are to change."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Given] = Field(init=False)

    def options(self, settings: PolicySettings) -> dict[str, str]:
        """As texts, when the policy has all of them and they may change.

        Raises:
            WireError: 400 for no option, or one that the policy lacks, 409 for one that may not change while it serves.
        """
        if not self.__pydantic_extra__:
            names = ", ".join(settings.changeable) or "it has none"
            raise WireError(f"give an option of policy {settings.name} that is to change, and its value: {names}")
        for name in self.__pydantic_extra__:
            try:
                settings.check_changes([name])
            except SettledError as error:
                raise WireError(str(error), param=name, status=409) from error
            except ValueError as error:
                raise WireError(str(error), param=name[:60]) from error
        return {name: option_text(value) for name, value in self.__pydantic_extra__.items()}


class PolicyInfo(BaseModel):
    """`GET /admin/policy`, and what a change answers: the policy with all options as they are in force."""

    policy: str
    options: dict[str, OptionValue]
    changeable: list[str]
    """The options that may change while it serves."""

    @classmethod
    def of(cls, settings: PolicySettings) -> PolicyInfo:
        """The same as JSON."""
        return cls(policy=settings.name, options=dict(settings.options), changeable=list(settings.changeable))
