# A node of the Ray cluster: drafts, targets, and the head with the launcher.
ARG PYTHON_IMAGE=python:3.11-slim

# The libraries alone: a change of our code leaves them as they are.
FROM ${PYTHON_IMAGE} AS libraries
# A release gives its commit's time, in seconds: no later one is in the image, and bytecode goes by hash instead of time.
ARG SOURCE_DATE_EPOCH
# Where pip looks for torch besides its own index. An index of CPU builds gives a CPU image; the plain one carries CUDA.
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /app
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/requirements.py deploy/docker/
RUN python deploy/docker/requirements.py engine quant ray trace certs > /tmp/requirements.txt \
    && /opt/venv/bin/pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
       -r /tmp/requirements.txt
COPY deploy/docker/outrider /opt/venv/bin/outrider
RUN echo /app > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outrider.pth"

FROM ${PYTHON_IMAGE}
ARG SOURCE_DATE_EPOCH
# tini reaps what Ray leaves behind. g++: a worker compiles its C++ library for the very processor it finds, once per cache
# volume.
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/outrider --create-home outrider \
    && install -d -o outrider -g outrider /var/cache/outrider /run/outrider
COPY --from=libraries /opt/venv /opt/venv
WORKDIR /app
COPY LICENSE ./
COPY models models
COPY outrider outrider
COPY draft_service draft_service
COPY target_service target_service
COPY deploy deploy
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/outrider HF_HOME=/var/cache/outrider/huggingface OUTRIDER_CACHE_DIR=/var/cache/outrider/native \
    TRITON_CACHE_DIR=/var/cache/outrider/triton CUDA_CACHE_PATH=/var/cache/outrider/cuda \
    HF_TOKEN_PATH=/etc/outrider/secrets/hf-token OUTRIDER_NODE_FOLDER=/tmp/outrider-node RAY_USAGE_STATS_ENABLED=0
# The file system is read-only when it runs: what is not compiled now is compiled at every start.
RUN python -m compileall -q outrider draft_service target_service deploy
USER 10001:10001
ENTRYPOINT ["tini", "--", "/app/deploy/docker/node.sh"]
CMD ["worker"]
