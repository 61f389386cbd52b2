"""The base class of policies, which plan the next steps from a read-only view and are notified of events."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from longspan.core.view import Admitted, ClusterView, Plan, RequestView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from longspan.core.cluster import Cluster
    from longspan.core.options import PolicySettings
    from longspan.core.sparse import SparseSetting


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a policy that has none. The engine bounds its steps."""


class Policy:
    """Plans the next steps of an engine. Pure: the same views and events, in the same order, give the same plans.

    A subclass names itself (`class Chunked(Policy, name="chunked")`) and implements `plan`.

    Attributes:
        name: the name by which users choose the policy.
        Options: a dataclass of options, which checks their values.
        changeable: the options that may change while the policy serves, see `change`.
        reads_hosts: the oldest blocks of a request that exceeds the largest group are on hosts.
        knows_roles: some instances may only prefill, or only decode.
        shards_decodes: the KV of a request may be on several decode instances.
        takes_phases: instances of both roles use the same devices in alternating phases, see `admits`.
        whole_prompts: steps should hold whole prompts where memory allows.
        instances: the instances that prefill, in order of proximity.
        options: the options in force.
        given: the options that users gave, as texts.

    Args:
        facts: `policy.facts.Facts` of the model and the hardware.
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type[Any]] = NoOptions
    changeable: ClassVar[tuple[str, ...]] = ()
    reads_hosts: bool = False
    knows_roles: ClassVar[bool] = False
    shards_decodes: ClassVar[bool] = False
    takes_phases: ClassVar[bool] = False
    whole_prompts: bool = False

    def __init_subclass__(cls, *, name: str | None = None, **more: object) -> None:
        super().__init_subclass__(**more)
        if name is not None:
            cls.name = name

    def __init__(self, instances: tuple[int, ...], options: Any, facts: Any) -> None:  # noqa: ANN401 - of a subclass
        del facts
        self.instances, self.options = instances, options
        self.reads_hosts = type(self).reads_hosts and getattr(options, "rotate", "") != "token"
        self.given: Mapping[str, str] = {}

    def plan(self, view: ClusterView) -> Plan:
        """Schedule parts on instances that are not full. An empty plan waits for the next event.

        A step for a busy instance is planned ahead. Tokens of steps in flight count as computed and sampled, though the
        last token of a request may be unknown. Only requests without steps in flight can be preempted.
        """
        raise NotImplementedError

    def arrived(self, request: RequestView) -> None:
        """A request was added. A new policy gets this event for every unfinished request."""

    def ended(self, request: RequestView) -> None:
        """A request has ended: finished, aborted or failed. It may hold KV until the steps that name it complete."""

    def preempted(self, request: RequestView) -> None:
        """A request is about to lose its KV on `request.group`, and waits again."""

    def resumed(self, request: RequestView) -> None:
        """A preempted request is admitted again, on `request.group`."""

    @property
    def capacity(self) -> int:
        """The number of instances whose KV pools one request can fill."""
        return 1

    def capacity_on(self, cluster: Cluster) -> int:
        """Return the number of instances of a cluster whose KV pools one request can fill."""
        del cluster
        return self.capacity

    def admits(self, cluster: Cluster) -> Admitted:
        """Return which waiting requests the policy admits on a cluster."""
        del cluster
        return "all"

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raise ValueError for a prompt of a length that the policy cannot place."""

    def sparse(self, num_prompt_tokens: int, block_size: int, num_blocks: int) -> SparseSetting | None:
        """Return how the prefill of a prompt drops tokens. `num_blocks` is the size of each pool. None is exact."""
        del num_prompt_tokens, block_size, num_blocks
        return None

    @property
    def hint(self) -> str | None:
        """Advice for the user about an option that was not given, if there is any."""
        return None

    @property
    def traffic(self) -> Any | None:  # noqa: ANN401 - of package `policy`, which this package does not import
        """The latest requests, as `policy.traffic.Traffic`: another object after a change. None if it keeps none."""
        return None

    @property
    def settings(self) -> PolicySettings:
        """The name of the policy and its options."""
        from longspan.core.options import PolicySettings  # noqa: PLC0415 - to show options only

        shown = (str, int, float, type(None))  # options of a plug-in may have other types
        values = asdict(self.options).items()
        options = {name: value if isinstance(value, shown) else str(value) for name, value in values}
        return PolicySettings(name=self.name, options=options, changeable=self.changeable, given=self.given)

    def update(self, changes: Mapping[str, str | None]) -> None:
        """Change options between two plans. None removes an option. Running requests keep their groups and layouts.

        Raises:
            ValueError: for an unknown option, a bad value, or an option that may not change. Nothing changes then.
        """
        from longspan.core.option_values import parse_options  # noqa: PLC0415 - most policies never change

        self.settings.check_changes(changes)
        given = {name: value for name, value in self.merged(changes).items() if value is not None}
        self.change(parse_options(self.name, self.Options, given))
        self.given = given

    def merged(self, changes: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the options given after a change. A subclass drops the options that the changed ones replace."""
        return {**self.given, **changes}

    def change(self, options: Any) -> None:  # noqa: ANN401 - of a subclass
        """Use other `options` from the next plan on. Raise ValueError, and change nothing, if they are invalid."""
        self.options = options
