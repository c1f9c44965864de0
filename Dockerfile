# megasdc with the versions that were tested together, on a CPU or on CUDA:
#
#   docker build --tag megasdc .
#   docker build --tag megasdc:cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
# BASE is any Debian or Ubuntu whose python3 is 3.11 to 3.13. With TORCH_INDEX empty, torch comes from the index that pip
# is configured with.
ARG BASE=debian:12-slim
FROM ${BASE}

# g++ compiles what is made on hosts without a GPU, and DeepSpeed's own operations; ssh and pdsh reach other hosts.
# Distributions keep one version of a package, so that none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ numactl openssh-client pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/megasdc
ENV PATH=${VIRTUAL_ENV}/bin:${PATH}

# The large packages come first, so that a changed megasdc does not install them again.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY launch/constraints.txt /opt/constraints.txt
RUN python3 -m venv "${VIRTUAL_ENV}" \
    && pip install --no-cache-dir --constraint /opt/constraints.txt ninja setuptools wheel \
    && pip install --no-cache-dir --constraint /opt/constraints.txt torch \
        ${TORCH_INDEX:+--index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple}

COPY . /src
RUN pip install --no-cache-dir --constraint /opt/constraints.txt "/src[all]" \
    && rm -rf /src/build \
    && megasdc --version

# Runs and data lie in a folder of the host: docker run --volume "$PWD:/work" megasdc megasdc launch ...
WORKDIR /work
CMD ["megasdc", "--help"]
