# The gateway, the SDK and the command line: no torch, no Ray.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /app
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/requirements.py deploy/docker/
# The libraries first: a change of our code leaves this layer as it is.
RUN python deploy/docker/requirements.py trace certs > /tmp/requirements.txt \
    && /opt/venv/bin/pip install -c constraints.txt -r /tmp/requirements.txt
COPY README.md LICENSE ./
COPY outrider outrider
COPY gateway gateway
COPY deploy/docker/health.py deploy/docker/
RUN /opt/venv/bin/pip install --no-deps -e . && /opt/venv/bin/python -m compileall -q outrider gateway

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/outrider --create-home outrider
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 10001:10001
EXPOSE 8000 8001
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--host", "0.0.0.0"]
