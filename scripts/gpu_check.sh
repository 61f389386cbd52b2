#!/usr/bin/env bash
# Runs the checks that need a CUDA device: scripts/gpu_check.sh quick|full OUT [--only CHECK ...]
#
# quick takes at most 150 seconds. full takes at most 590 and includes the checks of quick. OUT gets report.json and
# log.txt. PYTHON is the interpreter of the checks, by default that of `make .venv`. WHEELS is a folder of wheels to
# install for the run, see docs/gpus.md. tools/gpu_check.py runs the checks and needs Python 3.9 or newer.
set -eu
cd "$(dirname "$0")/.."
export PYTHON="${PYTHON:-.venv/bin/python}"
exec "$(command -v python3 || echo "$PYTHON")" tools/gpu_check.py "$@"
