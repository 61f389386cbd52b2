"""Print the errors of the cost model against measured kernels, by kind, device, dtype and size.

    python benchmarks/kernel_errors.py DATA

DATA is a folder with kernels/*.csv.gz: milliseconds of single kernels of vLLM and TensorRT-LLM, sampled from the tables
of AIConfigurator (Apache-2.0). "Before" is commit 90e53d91. Held-out errors are of constants that are fitted again by
this script, without a tenth of the shapes, or without one framework. Constants of collectives were fitted without both.
The means by device and dtype are stored in measured_kernels/errors.json, for docs/cost.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from measured_kernels import attention, collectives, products
from measured_kernels.frame import print_errors, summary

_SUMMARY = Path(__file__).parent / "measured_kernels" / "errors.json"


def main(data: Path) -> None:
    """Print the errors of all kinds, and store their means."""
    errors = [error for kind in (products, attention, collectives) for error in kind.errors(data)]
    print_errors(errors)
    head, rows = summary(errors)
    _SUMMARY.write_text(json.dumps({"head": head, "rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder with kernels/*.csv.gz")
    main(Path(sys.argv[1]))
