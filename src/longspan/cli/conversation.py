"""A conversation as token ids, so that each turn finds the keys and values of the turns before it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput
    from longspan.text.chat_template import Message

_log = logging.getLogger("longspan")


class Conversation:
    """Messages, and the token ids that stand for them.

    An answer stays as the tokens that were sampled: its text, tokenized again, can give others, whose keys and values
    are nowhere. What a turn adds is what the template renders behind the answer's text.
    """

    def __init__(self, llm: LLM, *, system: str | None = None, chat_template: str | None = None) -> None:
        self._llm, self._system, self._chat_template = llm, system, chat_template
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages: list[Message] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})
        self._text = ""  # what `token_ids` stand for; empty when there is no text whose tokens can stay
        self.token_ids: list[int] = []

    def prompt(self, user: str) -> list[int]:
        """The token ids that ask for the answer to `user`; changes nothing.

        Raises:
            ValueError: when the template refuses the messages.
        """
        text = self._rendered(user)
        if self._text and text.startswith(self._text):
            return self.token_ids + self._llm.tokenize(text[len(self._text) :], add_special_tokens=False)
        if self._text:
            _log.info("the chat template changed an answer: the conversation is tokenized anew")
        return self._llm.tokenize(text, add_special_tokens=False)

    def add(self, user: str, output: RequestOutput) -> None:
        """Appends a question and the (whole) output for `prompt(user)`."""
        [answer] = output.outputs
        rendered = self._rendered(user)
        self._messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer.text}]
        # The template writes the end of an answer itself. A stop string is in the tokens, and not in the text.
        by_token = answer.finish_reason == "stop"
        self.token_ids = output.prompt_token_ids + (answer.token_ids[:-1] if by_token else answer.token_ids)
        self._text = "" if isinstance(answer.stop_reason, str) else rendered + answer.text

    def _rendered(self, user: str) -> str:
        messages: list[Message] = [*self._messages, {"role": "user", "content": user}]
        return self._llm.render_chat(messages, chat_template=self._chat_template)
