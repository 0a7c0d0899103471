# A node of the Ray cluster: drafts, targets, and the head with the launcher.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
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
COPY README.md LICENSE ./
COPY outrider outrider
COPY draft_service draft_service
COPY target_service target_service
COPY deploy deploy
COPY models models
RUN /opt/venv/bin/pip install --no-deps -e . \
    && /opt/venv/bin/python -m compileall -q outrider draft_service target_service deploy

FROM ${PYTHON_IMAGE}
# tini reaps what Ray leaves behind. g++: a worker on CPU compiles its forward for the very processor it finds, once per cache volume.
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/outrider --create-home outrider \
    && install -d -o outrider -g outrider /var/cache/outrider /run/outrider
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/outrider HF_HOME=/var/cache/outrider/huggingface OUTRIDER_CACHE_DIR=/var/cache/outrider/native \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["tini", "--", "/app/deploy/docker/node.sh"]
CMD ["worker"]
