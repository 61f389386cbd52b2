"""Seesaw: what its text says of static parallelism, beside the cost model, and all its claims.

    python benchmarks/papers/seesaw.py

Figure 1 has 16 requests of a length that is not given; 1,000 tokens are taken here, and no time in which stages wait,
since other requests fill them. Of Figure 4 no length is given either: the largest batches that fit are compared, of
requests with the 3,000 tokens that articles of arxiv-summarization have.
"""

from __future__ import annotations

import sys

from cells import Setting
from verdicts import Claim, numbers, order, report_claims

from longspan.cost.estimate import Estimate

_BATCH, _TOKENS, _ARTICLE = 16, 1000, 3000
_PREFILL, _DECODE = ("pp8", "tp2pp4", "tp4pp2", "tp8"), ("tp8", "pp8")
_RESHARDING = "Weights are not re-sharded while serving, and no policy fills the tier on the host before it decodes."


def main() -> bool:
    """Prints the claims; returns whether those that are required hold."""
    return report_claims("Seesaw", claims())


def claims() -> list[Claim]:
    """Lists the claims of the paper; those about re-sharding have nothing to run yet."""
    l4 = Setting(model="llama-2-13b", hardware="l4")
    stages = {
        "prefill": {spec: _filled_s(l4.prefill(spec, "local", _TOKENS, batch=_BATCH)) for spec in _PREFILL},
        "decode": {spec: l4.decode(spec, _TOKENS, _BATCH).seconds for spec in _DECODE},
    }
    others = (
        ("3.2, Fig. 4", "With 4 of 8 GPUs each, prefill is over 6 times quicker than decoding (70B).", "6; 15 %"),
        ("6.2, Fig. 10", "On A10 throughput is 1.45 times the best single parallelism's on average.", "up to 1.78"),
        ("6.2, Fig. 10", "On L4 it is 1.29 times that.", "up to 1.52"),
        (
            "6.3, Fig. 12",
            "Prefill and decoding are each nearly as quick as with the best parallelism for them.",
            "no number",
        ),
        (
            "6.4, Fig. 11",
            "It is quicker on A100s, too, by NVLink and by PCIe.",
            "kept for later; vLLM on PCIe 60 % of SXM",
        ),
        ("6.5, Fig. 13", "It is the best at every ratio of lengths of output and input.", "no number"),
        ("6.5, Fig. 14", "It is the best for links of 0.1 to 50 times PCIe's speed.", "0.1 to 50"),
    )
    return [
        Claim(
            "Fig. 1, 3.1",
            "Pipeline parallelism is best for prefill, tensor parallelism for decoding.",
            order(stages),
        ),
        Claim(
            "3.2",
            "Decoding on 4 of 8 GPUs has only 15 % of the throughput of that on 8 (70B).",
            numbers({"": (0.15, _share_of_half(_ARTICLE))}),
            "The share depends on the length, which is not given: it is less for longer requests.",
        ),
        *(Claim(where, says, given, _RESHARDING) for where, says, given in others),
    ]


def _filled_s(estimate: Estimate) -> float:
    return estimate.seconds - estimate.breakdown.pipeline_s


def _share_of_half(tokens: int) -> float:
    """Compares tokens per second of the largest batches that fit on four devices and on eight."""
    setting = Setting(model="llama-2-70b", hardware="a100-sxm-40g")
    four, eight = (max(_throughputs(setting, spec, tokens), default=0.0) for spec in ("tp4", "tp8"))
    return four / eight


def _throughputs(setting: Setting, spec: str, tokens: int) -> list[float]:
    found, batch = [], 1
    while (step := setting.decode(spec, tokens, batch)).memory.fits:
        found.append(batch / step.seconds)
        batch += 1
    return found


if __name__ == "__main__":
    sys.exit(not main())
