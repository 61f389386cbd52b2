"""Fields of OpenAI's or vLLM's API that would change the answer, which longspan cannot do: refused, not ignored.

A field in no table here that no model knows changes nothing of an answer (`user`, `store`, `metadata`) and is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from longspan.serve.wire.errors import WireError

Table = Mapping[str, tuple[tuple[object, ...], str]]
"""Field to the values that ask for nothing (null is always one), and what to say to others."""

_NO_TOOLS = "tools are not supported: put their description into a message"
_NO_GUIDED = "guided decoding has another name here: use structured_outputs or response_format"
_NO_TEMPLATE = "the model's own chat template is used: chat_template_kwargs sets its variables"
_NO_PENALTY = "it is not supported: use repetition_penalty, frequency_penalty or presence_penalty"
_MAX_TOKENS = "it has another name here: use max_tokens"
_TEXT_ONLY = "only text is served"
_NO_SAMPLER = "this way of sampling is not supported: use temperature, top_p, top_k or min_p"
_TRANSFER = "the server keeps KV for itself: leave it out"

_EVERYWHERE: Table = {
    "use_beam_search": ((False,), "beam search is not supported: use n and temperature"),
    "length_penalty": ((1,), "it belongs to beam search, which is not supported"),
    "early_stopping": ((False,), "it belongs to beam search, which is not supported"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the output: append stop_reason to it"),
    "skip_special_tokens": ((True,), "special tokens are never part of the output: use return_token_ids"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of the output"),
    "truncate_prompt_tokens": ((), "prompts are never cut: shorten the prompt"),
    "allowed_token_ids": (([],), "it is not supported: use logit_bias or structured_outputs"),
    "bad_words": (([],), "it is not supported: use logit_bias"),
    "logits_processors": (([],), "they are not supported: use logit_bias or structured_outputs"),
    "logprob_token_ids": (([],), "logprobs of chosen tokens are not supported: use top_logprobs or logprobs"),
    "return_tokens_as_token_ids": ((False,), "it is not supported: use return_token_ids"),
    "repetition_detection": ((), "it is not supported: use a penalty"),
    "thinking_token_budget": ((-1,), "it is not supported: use max_tokens"),
    "watermarking": ((False,), "it is not supported"),
    "cache_salt": ((), "the prefix cache is shared by all: prompts that must not share it need a server of their own"),
    "priority": ((0,), "requests are served in the order in which they come"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "kv_transfer_params": (({},), _TRANSFER),
    "ec_transfer_params": (({},), _TRANSFER),
    "vllm_xargs": (({},), "there are no extensions that would read them"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "web_search_options": ((), "nothing is searched: put what is to be known into a message"),
    "documents": (([],), "documents are not supported: put them into a message"),
    "chat_template": ((), _NO_TEMPLATE),
    "reasoning_effort": ((), _NO_TEMPLATE),
    "verbosity": ((), "it is not supported: ask for it in a message"),
    "suffix": (("",), "text cannot be inserted: only continuations are served"),
    # Of samplers with several parameters, those that turn them on: alone, the others change nothing.
    "typical_p": ((1,), _NO_SAMPLER),
    "typical": ((1,), _NO_SAMPLER),
    "top_a": ((0,), _NO_SAMPLER),
    "tfs": ((1,), _NO_SAMPLER),
    "tfs_z": ((1,), _NO_SAMPLER),
    "epsilon_cutoff": ((0,), _NO_SAMPLER),
    "eta_cutoff": ((0,), _NO_SAMPLER),
    "mirostat": ((0,), _NO_SAMPLER),
    "mirostat_mode": ((0,), _NO_SAMPLER),
    "xtc_probability": ((0,), _NO_SAMPLER),
    "top_n_sigma": ((0, -1), _NO_SAMPLER),
    "nsigma": ((0, -1), _NO_SAMPLER),
    "smoothing_factor": ((0,), _NO_SAMPLER),
    "dynamic_temperature": ((False,), _NO_SAMPLER),
    "dynatemp_range": ((0,), _NO_SAMPLER),
    "penalty_alpha": ((0,), _NO_SAMPLER),
    "guidance_scale": ((1,), "guidance by a second prompt is not supported"),
    "dry_multiplier": ((0,), _NO_PENALTY),
    "no_repeat_ngram_size": ((0,), _NO_PENALTY),
    "encoder_repetition_penalty": ((1,), _NO_PENALTY),
    "repeat_penalty": ((1,), "it has another name here: use repetition_penalty"),
    "do_sample": ((True,), "set temperature to 0 for greedy sampling"),
    "num_beams": ((1,), "beam search is not supported: use n and temperature"),
    "max_new_tokens": ((), _MAX_TOKENS),
    "n_predict": ((-1,), _MAX_TOKENS),
    "min_new_tokens": ((0,), "it has another name here: use min_tokens"),
    "grammar": (("",), _NO_GUIDED),
    "ebnf": (("",), _NO_GUIDED),
    "regex": (("",), _NO_GUIDED),
    "json_schema": ((), _NO_GUIDED),
    "guided_json": ((), _NO_GUIDED),
    "guided_regex": ((), _NO_GUIDED),
    "guided_choice": ((), _NO_GUIDED),
    "guided_grammar": ((), _NO_GUIDED),
    "guided_json_object": ((False,), _NO_GUIDED),
    "guided_decoding_backend": ((), _NO_GUIDED),
    "guided_whitespace_pattern": ((), _NO_GUIDED),
}

COMPLETION: Table = {
    **_EVERYWHERE,
    "top_logprobs": ((0,), "logprobs says here how many: use logprobs"),
    "chat_template_kwargs": (({},), "no template is used here: use /v1/chat/completions"),
    "continue_final_message": ((False,), "no template is used here: use /v1/chat/completions"),
}

CHAT: Table = {
    **_EVERYWHERE,
    "echo": ((False,), "messages cannot be echoed: use /v1/completions"),
}

TOKENIZE: Table = {name: CHAT[name] for name in ("tools", "documents", "chat_template")}

MESSAGE: Table = {
    "audio": ((), _TEXT_ONLY),
    "function_call": ((), "calls of functions are not supported: use tool_calls"),
}

STRUCTURED: Table = {
    "disable_any_whitespace": ((False,), "it is not supported"),
    "disable_additional_properties": ((False,), 'it is not supported: write "additionalProperties": false'),
    "whitespace_pattern": ((), "it is not supported"),
    "structural_tag": ((), "it is not supported: use grammar"),
}


def refuse(data: object, table: Table) -> None:
    """Looks for fields that are refused in an object that was not validated yet.

    Raises:
        WireError: for the first one.
    """
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        harmless, reason = table.get(name, ((value,), ""))
        if value is not None and value not in harmless:
            raise WireError(reason, name)


def refuse_best_of(data: object) -> None:
    """`best_of` is refused where it is not `n`: more outputs than are returned would be drawn and ranked.

    Raises:
        WireError: in that case.
    """
    if isinstance(data, dict) and (best_of := data.get("best_of")) is not None and best_of != (data.get("n") or 1):
        raise WireError("outputs are not ranked: leave it out, or make it equal to n", "best_of")


def refuse_max_completion_tokens(data: object) -> None:
    """In completions, it is refused where it is not `max_tokens`: some clients send both.

    Raises:
        WireError: in that case.
    """
    if isinstance(data, dict) and data.get("max_completion_tokens") not in (None, data.get("max_tokens")):
        raise WireError(_MAX_TOKENS, "max_completion_tokens")
