# The gateway, the SDK and the command line: no torch, no Ray.
ARG PYTHON_IMAGE=python:3.11-slim

# The libraries alone: a change of our code leaves them as they are.
FROM ${PYTHON_IMAGE} AS libraries
# A release gives its commit's time, in seconds: no later one is in the image, and bytecode goes by hash instead of time.
ARG SOURCE_DATE_EPOCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /app
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/requirements.py deploy/docker/
RUN python deploy/docker/requirements.py trace certs > /tmp/requirements.txt \
    && /opt/venv/bin/pip install -c constraints.txt -r /tmp/requirements.txt
COPY deploy/docker/outrider /opt/venv/bin/outrider
RUN echo /app > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outrider.pth"

FROM ${PYTHON_IMAGE}
ARG SOURCE_DATE_EPOCH
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/outrider --create-home outrider
COPY --from=libraries /opt/venv /opt/venv
WORKDIR /app
COPY LICENSE ./
COPY deploy/docker/container_health.py deploy/docker/
COPY outrider outrider
COPY gateway gateway
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The file system is read-only when it runs: what is not compiled now is compiled at every start.
RUN python -m compileall -q outrider gateway
USER 10001:10001
EXPOSE 8000 8001
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--host", "0.0.0.0"]
