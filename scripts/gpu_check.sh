#!/usr/bin/env bash
# Runs the checks that need a CUDA device: scripts/gpu_check.sh quick|full OUT [--only CHECK ...]
#
# quick ends within 150 seconds, full within 590, and begins with the checks of quick. OUT gets report.json and log.txt.
# PYTHON names the interpreter of the checks, by default the one of `make .venv`. WHEELS names a folder of wheels that
# are installed for the run, see docs/gpus.md. tools/gpu_check.py, which runs the checks, needs any Python from 3.9 on.
set -eu
cd "$(dirname "$0")/.."
export PYTHON="${PYTHON:-.venv/bin/python}"
exec "$(command -v python3 || echo "$PYTHON")" tools/gpu_check.py "$@"
