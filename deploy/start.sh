#!/bin/sh
# Run a verb of longspan from a read-only installation: start.sh VERB [FLAGS]
#
# LONGSPAN_CACHE is a writable folder for kernels and further models. It gets links to the weights and kernels that
# install.sh has made. TMPDIR (/tmp) is the only other folder that must be writable.
set -eu

prefix=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cache=${LONGSPAN_CACHE:?is the writable folder for kernels and further models}
umask 077
for entry in "$prefix"/cache/*/*; do
    link=$cache/${entry#"$prefix/cache/"}
    if [ ! -e "$link" ]; then
        mkdir -p "${link%/*}"
        ln -sfn "$entry" "$link"
    fi
done
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$cache/triton}" HF_HOME="${HF_HOME:-$cache/huggingface}"
exec "$prefix/venv/bin/longspan" "$@"
