"""Compare predicted times per output token of models with experts with public measurements.

    python benchmarks/experts.py

No constant is fitted to them. Requests are closed-loop: N at a time, each of equal lengths. A step decodes all of them.
While a request decodes, the prompts of the other N - 1 requests are computed once each.
So TPOT = step + (N - 1) * prompt / output tokens.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL
from longspan.cost.estimate import estimate_decode, estimate_prefill
from longspan.cost.forward import rooflines
from longspan.cost.topology import Devices
from longspan.simulation import read_architecture


@dataclass(frozen=True, kw_only=True)
class Load:
    """Measurements of one deployment and one pair of lengths.

    Attributes:
        tpot_ms: milliseconds per output token after the first, by the number of concurrent requests.
    """

    source: str
    model: str
    hardware: str
    parallel: str
    input_len: int
    output_len: int
    tpot_ms: dict[int, float]

    def predicted_ms(self, concurrency: int) -> float:
        model, devices = read_architecture(self.model), Devices(hardware=self.hardware, gpus_per_host=8)
        [line] = rooflines(model, devices, Cluster.of(self.parallel))
        step_s = estimate_decode(line, 1, LOCAL, self.input_len + self.output_len // 2, concurrency).seconds
        prompt_s = estimate_prefill(line, 1, LOCAL, self.input_len).seconds
        return 1e3 * (step_s + (concurrency - 1) * prompt_s / self.output_len)


_GPT_OSS = {
    "source": "vLLM, github.com/SemiAnalysisAI/InferenceX/issues/828",
    "model": "gpt-oss-120b",
    "hardware": "h100-sxm-80g",
    "parallel": "tp8",
}
# InferenceX draws lengths from 80 to 100 % of the nominal ones.
LOADS = (
    Load(**_GPT_OSS, input_len=922, output_len=922, tpot_ms={4: 3.72, 8: 4.05, 16: 4.83, 32: 5.82, 64: 7.36}),
    Load(**_GPT_OSS, input_len=922, output_len=7373, tpot_ms={4: 3.68, 8: 4.00, 16: 4.53, 32: 5.65}),
    Load(**_GPT_OSS, input_len=7373, output_len=922, tpot_ms={4: 3.95, 8: 4.59}),
    Load(
        source="SGLang 0.5.7, DeepSeek R1, github.com/SemiAnalysisAI/InferenceX/issues/870",
        model="deepseek-v3",
        hardware="h200-sxm",
        parallel="tp8",
        input_len=922,
        output_len=922,
        tpot_ms={8: 12.8, 16: 17.2, 32: 25.6, 64: 34.6},
    ),
    Load(
        source="vLLM, github.com/vllm-project/vllm/pull/23151",
        model="qwen3-30b-a3b",
        hardware="h100-sxm-80g",
        parallel="1",
        input_len=2048,
        output_len=1024,
        tpot_ms={10: 13.18},
    ),
)


def errors_of(load: Load) -> dict[int, float]:
    """Return the relative error by the number of concurrent requests."""
    return {number: load.predicted_ms(number) / measured_ms - 1 for number, measured_ms in load.tpot_ms.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    errors = []
    for load in LOADS:
        print(f"{load.model} on {load.parallel} {load.hardware}, {load.input_len}/{load.output_len} ({load.source})")
        for number, error in errors_of(load).items():
            errors.append(error)
            measured_ms = load.tpot_ms[number]
            print(
                f"  {number:3} requests: {(1 + error) * measured_ms:6.2f} ms, measured {measured_ms:6.2f}: {error:+.1%}"
            )
    print(f"mean {statistics.fmean(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%} of {len(errors)} cells")


if __name__ == "__main__":
    main()
