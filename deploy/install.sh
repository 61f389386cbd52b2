#!/bin/sh
# Install longspan with the weights of the default model: deploy/install.sh PREFIX [SOURCE]
#
# PREFIX gets venv/ (Python packages), cache/ (converted weights and compiled kernels) and start.sh. Nothing writes there
# later, so it can be read-only and belong to another user. SOURCE is a checkout or a wheel, by default this checkout.
#
#   DEVICE=cpu|cuda    PyTorch's build: without CUDA's libraries (default), or with them
#   RAY=1              also install Ray, for several hosts and for deploy/kubernetes/rayservice.yaml
#   PYTHON=python3.12  the interpreter, by default python3
#   TORCH_INDEX=URL    the package index of PyTorch's build for CPUs
#   LONGSPAN_DTYPE     and other options of the engine: the weights are converted for them
set -eu

prefix=${1:?usage: install.sh PREFIX [SOURCE]}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
source=${2:-$(dirname -- "$here")}
device=${DEVICE:-cpu}
umask 022

mkdir -p "$prefix"
prefix=$(CDPATH='' cd -- "$prefix" && pwd)
"${PYTHON:-python3}" -m venv "$prefix/venv"
pip() {
    "$prefix/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir \
        --constraint "$here/../constraints.txt" "$@"
}

case $device in
cpu) pip --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch ;; # the constraints name a build for CPUs
cuda) ;; # the build of the package index
*)
    echo "DEVICE is cpu or cuda, but $device given" >&2
    exit 2
    ;;
esac
pip "${source}[gguf,otel]"
if [ -n "${RAY:-}" ]; then
    pip 'ray[default,serve]>=2.60,<3'
    packages=$("$prefix/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    install -m 644 "$here/ray/longspan_app.py" "$packages"
fi

# The first engine converts the model and compiles the kernels. The server uses the same precision.
export LONGSPAN_CACHE="$prefix/cache"
"$prefix/venv/bin/longspan" get smollm2-135m
"$prefix/venv/bin/longspan" generate --prompt Hello --max-tokens 1 >/dev/null
rm -rf "$prefix/cache/logs" "$prefix/cache/hashes" "$prefix"/cache/*/*.lock

install -m 755 "$here/start.sh" "$prefix/start.sh"
chmod -R go+rX "$prefix"
