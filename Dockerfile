# The GPU image: NVIDIA's PyTorch image, which brings torch, CUDA, NCCL, Transformer Engine and apex,
# with vLLM, Megatron-Core and this package on top. docs/containers.md says how to build and start it.
#
#   docker build --tag rlhf-megatron .
#   docker build --target test .            # the unit tests, inside the image

# 26.03 holds torch 2.11 (CUDA 13.2), the release that vLLM 0.25.1 is built for, and Python 3.12.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.03-py3

FROM ${BASE_IMAGE} AS dependencies
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/rlhf-megatron
# Only what the installation reads: this layer is built anew when a pin changes, not when code does.
COPY requirements/install.sh requirements/gpu.txt requirements/
RUN requirements/install.sh gpu

FROM dependencies AS package
COPY setup.py pyproject.toml README.md LICENSE ./
COPY rlhf_megatron/ rlhf_megatron/
COPY tools/ tools/
RUN requirements/install.sh self
COPY launch/ launch/
COPY configs/ configs/

FROM package AS test
COPY requirements/dev.txt requirements/
RUN requirements/install.sh dev
COPY . .
RUN python3 -m pytest tests/unit

FROM package AS runtime
# The base image is made for root; a run needs no more than a folder to write to.
RUN groupadd --system --gid 10001 rlhf \
    && useradd --system --uid 10001 --gid rlhf --create-home rlhf \
    && install --directory --owner=rlhf --group=rlhf /workspace/runs
# By number, so that a cluster can see that it is not root.
USER 10001:10001
WORKDIR /workspace
ENV HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["rlhf-megatron"]
CMD ["--help"]
