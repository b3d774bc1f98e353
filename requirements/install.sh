#!/bin/sh
# requirements/install.sh SET: install a pinned set with the Python of $PYTHON (default: python3).
# The Makefile and the Dockerfiles call it, so that a virtual environment and an image get the same.
#
#   cpu    what runs on a CPU (Python 3.11)
#   gpu    what is missing from NVIDIA's PyTorch image (Python 3.12): neither torch nor what it brings
#   dev    what tests and linters need beside it
#   self   this package, without its dependencies, which the sets above pin
set -eu

here=$(dirname "$0")
python=${PYTHON:-python3}

pip() {
    "$python" -m pip --disable-pip-version-check install "$@"
}

case ${1:-} in
cpu)
    pip --requirement "$here/cpu.txt"
    pip --no-deps --requirement "$here/cpu-nodeps.txt"
    ;;
gpu)
    # The image's own constraints pin older versions of what vLLM needs. --no-deps: everything is
    # listed, and pip would replace the image's torch by another build.
    unset PIP_CONSTRAINT
    pip --no-deps --requirement "$here/gpu.txt"
    ;;
dev)
    unset PIP_CONSTRAINT
    pip --requirement "$here/dev.txt"
    ;;
self)
    pip --no-deps --no-build-isolation ${EDITABLE:+--editable} "$here/.."
    ;;
*)
    echo "usage: $0 cpu|gpu|dev|self" >&2
    exit 2
    ;;
esac
