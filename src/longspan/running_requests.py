"""The requests of an engine that calls or clients wait for: they are added, stepped and ended here."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from longspan.core.engine import Engine
from longspan.text.output_processor import Choice, RequestState


class _Owner(Protocol):
    @property
    def state(self) -> RequestState: ...


OwnerT = TypeVar("OwnerT", bound=_Owner)


class RunningRequests(Generic[OwnerT]):
    """Adds requests to an engine and finds the owners of the tokens that each step brings.

    Attributes:
        choices: by request id, the owner of each choice until it is forgotten, and the choice's index.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.choices: dict[int, tuple[OwnerT, int]] = {}

    def start(self, owner: OwnerT) -> None:
        """Add an owner's requests to the engine. All but the first share the first one's prompt.

        Raises:
            ValueError: the engine refuses the requests.
        """
        given, engine = owner.state.engine_request, self._engine
        ids, params, grammar = given.token_ids, given.params, given.grammar
        leader = engine.add(ids, params, grammar=grammar, cache_salt=given.cache_salt)
        others = [engine.add(ids, params, choice=i, leader=leader, grammar=grammar) for i in range(1, params.n)]
        try:
            owner.state.attach((leader, *others))
        except Exception:  # of a tokenizer
            for request in (leader, *others):
                engine.finish(request, "abort")
            raise
        for index, choice in enumerate(owner.state.choices):
            self.choices[choice.request.id] = owner, index

    def step(self, timeout_s: float | None = None) -> dict[OwnerT, Exception | None]:
        """Run one engine step, see `Engine.step`, and return the owners of requests that got a token.

        The value is the error if the tokens of an owner cannot become text. Other owners are not affected.
        """
        touched: dict[OwnerT, Exception | None] = {}
        for request in self._engine.step(timeout_s):
            if request.id not in self.choices:
                continue
            owner, index = self.choices[request.id]
            try:
                self._take_new_tokens(owner.state.choices[index])
                touched.setdefault(owner, None)
            except Exception as error:  # noqa: BLE001 - a tokenizer is foreign code, and may be the model's own
                touched[owner] = error
        return touched

    def finished(self) -> list[OwnerT]:
        """Return the owners that are not forgotten yet and whose requests have all ended."""
        return [owner for owner in self.owners() if owner.state.finished]

    def owners(self) -> list[OwnerT]:
        return [owner for owner, index in self.choices.values() if index == 0]

    def abort(self, owner: OwnerT) -> Exception | None:
        """End the unfinished requests of an owner and forget it. Return an error of the tokenizer, if there is one."""
        failure = None
        for choice in owner.state.choices:
            try:
                if not choice.finished:
                    self._engine.finish(choice.request, "abort")
                    self._take_new_tokens(choice)
            except Exception as error:  # noqa: BLE001 - see `step`
                failure = error
        self.forget(owner)
        return failure

    def forget(self, owner: OwnerT) -> None:
        for choice in owner.state.choices:
            self.choices.pop(choice.request.id, None)

    def _take_new_tokens(self, choice: Choice) -> None:
        if choice.take_new_tokens():
            self._engine.finish(choice.request, "stop")
