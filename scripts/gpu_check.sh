#!/usr/bin/env bash
# What only a machine with a CUDA device can show, in one call of at most ten minutes: scripts/gpu_check.sh OUT
#
# Goes on after failures. OUT gets versions first, then a log and, where there are numbers, JSON per check, and
# steps.jsonl with exit codes and seconds; the script's own exit code is 1 if any check failed. PYTHON names the
# interpreter, by default the one of `make .venv`. WHEELS names a folder of wheels, see docs/gpus.md: what is in them is
# found before what the interpreter has.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_check.sh OUT}
python=${PYTHON:-.venv/bin/python}
total=590 # seconds
mkdir -p "$out" && out=$(cd "$out" && pwd)
: > "$out/steps.jsonl"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD/src:$scratch/packages${PYTHONPATH:+:$PYTHONPATH}"
export LONGSPAN_CACHE="$scratch/cache" # no profile from before counts

checks() {
    if [ -n "${WHEELS:-}" ]; then
        check wheels 25 "$python" -m pip install --quiet --no-index --no-deps --target "$scratch/packages" "$WHEELS"/*.whl
    fi
    check versions 10 "$python" benchmarks/gpu_versions.py --json "$out/versions.json"
    check ceilings 25 "$python" benchmarks/gpu_ceilings.py --json "$out/ceilings.json"
    check tests 150 "$python" -m pytest -q -p no:cacheprovider --durations=10 -m "gpu and not full" tests/gpu
    for ranks in 2 4; do
        check "exchanges_$ranks" 20 "$python" -m longspan.attn.check --device cuda --ranks $ranks --cases 5
    done
    check generate 20 "$python" -m longspan generate --device cuda --prompt "The capital of France is" --max-tokens 8
    check 8b_reads 15 "$python" benchmarks/gpu_8b.py "$out" --parts reads
    for kernel in chosen cudnn flash; do
        check "8b_$kernel" 60 "$python" benchmarks/gpu_8b.py "$out" --parts $kernel --limit-s 15
    done
    check 8b_transformers 25 "$python" benchmarks/gpu_8b.py "$out" --parts transformers
    check 8b_table 10 "$python" benchmarks/gpu_8b.py "$out" --parts table
    check profile 30 "$python" -m longspan profile --device cuda --threads-per-rank 1 --json \
        --lengths 128,1024,2048,4096 --repeats 3
    check twin 60 "$python" benchmarks/twin.py --device cuda --instances 1 --policies chunked --stored --within 0.1 \
        --num-requests 40
}

# Each check has its seconds for sure, and what those before it have left.
reserved=0
check() { reserved=$((reserved + $2)); } # NAME SECONDS COMMAND...
checks
[ $reserved -le $total ] || { echo "the checks have $reserved seconds, more than $total" >&2; exit 2; }

failed=0
check() {
    local name=$1 begun=$SECONDS code
    reserved=$((reserved - $2))
    local limit=$((total - SECONDS - reserved))
    shift 2
    timeout --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    [ $code -eq 0 ] || failed=1
    printf '{"check": "%s", "exit_code": %d, "seconds": %d}\n' "$name" $code $((SECONDS - begun)) | tee -a "$out/steps.jsonl"
}
checks
exit $failed
