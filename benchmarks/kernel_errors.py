"""Print the errors of the cost model against measured kernels, by kind, device, dtype and size.

    python benchmarks/kernel_errors.py DATA

DATA is a folder with kernels/*.csv.gz: milliseconds of single kernels of vLLM and TensorRT-LLM, sampled from the tables
of AIConfigurator (Apache-2.0). "Before" is commit 90e53d91. Held-out errors are of constants that are fitted again by
this script, without a tenth of the shapes, or without one framework.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kernels import attention
from kernels.frame import print_errors

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder with kernels/*.csv.gz")
    for kind in (attention,):
        print_errors(kind.errors(Path(sys.argv[1])))
