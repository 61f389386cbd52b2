#!/usr/bin/env bash
# What only a machine with a CUDA device can show, in one call of at most ten minutes: scripts/gpu_check.sh OUT
#
# Goes on after failures. OUT gets a log per check and steps.jsonl with its exit code and seconds; the script's own exit
# code is 1 if any check failed. PYTHON names the interpreter, by default the one of `make .venv`.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_check.sh OUT}
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
: > "$out/steps.jsonl"
failed=0

check() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 begun=$SECONDS code
    shift 2
    timeout --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    [ $code -eq 0 ] || failed=1
    printf '{"check": "%s", "exit_code": %d, "seconds": %d}\n' "$name" $code $((SECONDS - begun)) | tee -a "$out/steps.jsonl"
}

check ceilings 60 "$python" benchmarks/gpu_ceilings.py --json "$out/ceilings.json"
check tests 240 "$python" -m pytest -q -m gpu tests/gpu
for ranks in 2 4; do
    check "exchanges_$ranks" 90 "$python" -m longspan.attn.check --device cuda --ranks $ranks --cases 5
done
check generate 60 "$python" -m longspan generate --device cuda --prompt "The capital of France is" --max-tokens 8
exit $failed
