# syntax=docker/dockerfile:1
# ragkv for machines without an NVIDIA GPU. From the repository's root: docker build -f deploy/cpu.Dockerfile -t ragkv .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS wheel
# g++: the kernels are compiled.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY requirements/cpu.txt requirements/
RUN pip install --no-cache-dir --no-deps "$(grep '^setuptools==' requirements/cpu.txt)"
COPY . .
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /dist .

FROM ${BASE}
# libnuma1: vLLM's kernels are linked with it. g++: for model.compile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# As setup.sh does it: the lock is complete, torch's CPU build comes from an index of its own, and with bytecode vLLM
# starts in half the time (templates in the packages that aren't Python stay behind).
COPY requirements/cpu.txt /requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --no-compile --extra-index-url https://download.pytorch.org/whl/cpu \
        "$(grep '^torch==' /requirements.txt)" \
    && pip install --no-deps --no-compile -r /requirements.txt \
    && { python -m compileall -q -j 0 /usr/local/lib/python3.11/site-packages || true; }
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist pip install --no-cache-dir --no-deps /dist/*.whl

# The home of ragkv is that of its user too: what vLLM and Hugging Face keep in ~/.cache lies on the same volume.
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/ragkv --shell /usr/sbin/nologin ragkv
USER 10001
WORKDIR /var/lib/ragkv
ENV RAGKV_HOME=/var/lib/ragkv \
    RAGKV_SERVER__HOST=0.0.0.0 \
    RAGKV_SERVER__PORT=8090

# Models to put into the image: --build-arg MODELS="smollm2-135m-instruct all-minilm-l6-v2". The first start fetches
# those that are missing.
ARG MODELS=""
RUN for model in $MODELS; do ragkv models fetch "$model" || exit 1; done
VOLUME /var/lib/ragkv

EXPOSE 8090
STOPSIGNAL SIGTERM
# The first start fetches models, loads them and measures the machine.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --start-interval=5s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['RAGKV_SERVER__PORT'] + '/readyz', timeout=4)"]
ENTRYPOINT ["ragkv"]
CMD ["serve", "--fetch"]
