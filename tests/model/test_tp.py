"""Models that cannot be split between ranks are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import BASE, write_checkpoint
from transformers import Olmo2Config

from longspan import LLM


def test_more_ranks_than_heads_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="tp 7 is too much for layers with 6 query heads and 3 KV heads"):
        LLM(str(folders["llama"]), tp=7, skip_tokenizer_init=True)


@pytest.mark.parametrize("arguments", [{"tp": 2}, {"instances": 2, "policy_options": {"exchange": "gather_hidden"}}])
def test_a_model_that_nobody_knows_how_to_split_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """OLMo 2 normalises all query heads together, which no rank has."""
    write_checkpoint(Olmo2Config(**BASE), tmp_path)
    with pytest.raises(ValueError, match=r"not known how to cut model\.layers\.0\.self_attn\.q_norm\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, **arguments)
