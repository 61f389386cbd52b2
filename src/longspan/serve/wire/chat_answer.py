"""Answers to `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator

from longspan.serve.updates import ChoiceDelta, Update
from longspan.serve.wire.answers import AnswerAssembler, Body, Choice, News
from longspan.serve.wire.logprobs import chat_logprobs, prompt_logprobs
from longspan.serve.wire.requests import ChatCompletionRequest


class ChatAssembler(AnswerAssembler[ChatCompletionRequest]):
    """Makes a chat's answer."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> Body:
        """See `Assembler`."""
        return super().whole() | self._of_prompt()

    def chunks(self, index: int, update: Update) -> list[Body]:
        """See `Assembler`; the first chunk has what is told of the prompt."""
        is_first = not any(choice.begun for choice in self.choices())
        chunks = super().chunks(index, update)
        if is_first and chunks:
            chunks[0] |= self._of_prompt()
        return chunks

    def news(self, choice: Choice, update: ChoiceDelta) -> News:
        """See `AnswerAssembler`."""
        del choice
        logprobs = None
        if self.request.logprobs:
            assert update.logprobs is not None, "they were asked for"
            num_top = self.request.top_logprobs or 0
            pairs = zip(update.token_ids, update.logprobs, strict=True)
            logprobs = {"content": [chat_logprobs(token, entries, num_top, self.names) for token, entries in pairs]}
        return News(
            text=update.text,
            token_ids=update.token_ids,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
        )

    def whole_choice(self, choice: Choice, news: News) -> Body:
        """See `AnswerAssembler`."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": news.text, "refusal": None},
            **self._of_output(news),
        }

    def chunk_choices(self, choice: Choice, news: News) -> Iterator[Body]:
        """The first chunk of a choice has the role and no text; the last one has the reason."""
        if not choice.begun:
            role = {"role": "assistant", "content": ""}
            yield {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None}
        if news.text or news.finish_reason or news.logprobs or self.request.return_token_ids:
            delta = {"content": news.text} if news.text else {}
            yield {"index": choice.index, "delta": delta, **self._of_output(news)}

    def _of_output(self, news: News) -> Body:
        body: Body = {
            "logprobs": news.logprobs,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        return body | ({"token_ids": news.token_ids} if self.request.return_token_ids else {})

    def _of_prompt(self) -> Body:
        [first, *_] = self.choices()
        body: Body = {}
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.scores_of(first), self.request.prompt_logprobs)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = first.engine_request.token_ids
        return body
