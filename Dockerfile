# The receiver as an image: no shell is needed to run it, nothing is built in it, one volume.
#
#   docker build -t consignee .
#   docker run -p 127.0.0.1:8080:8080 -v consignee:/var/lib/consignee --read-only \
#       -e CONSIGNEE_PUBLIC_URL=https://uploads.example.com \
#       -v ./consignee.toml:/etc/consignee/consignee.toml:ro consignee
#
# CONSIGNEE_PUBLIC_URL (or public_url in the file) must be https: it says that a proxy in front
# encrypts the way. Without it the receiver refuses to listen beyond loopback.

ARG BASE_IMAGE=docker.io/library/python:3.13-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN apt-get update && apt-get install --yes --no-install-recommends binutils
RUN python3 -m venv tools && python3 -m venv /opt/consignee

# The locks first: a change of the sources does not install the dependencies again.
COPY requirements/ requirements/
RUN tools/bin/pip install --require-hashes --only-binary :all: -r requirements/build.txt \
    && /opt/consignee/bin/pip install --require-hashes --only-binary :all: -r requirements/runtime.txt

COPY pyproject.toml README.md LICENSE ./
COPY app/ app/
COPY migrations/ migrations/
RUN tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/consignee/bin/pip install --no-deps --no-index dist/*.whl \
    && /opt/consignee/bin/pip uninstall --yes pip setuptools

# A quarter of what was installed helps nobody here: symbols for debuggers, sources of extensions,
# tests. What Python compiled stays: the root is read-only, and each check of health is a new
# process, which would compile all of it again.
RUN find /opt/consignee -name '*.so' -exec strip --strip-unneeded {} + \
    && find /opt/consignee -type d -name tests -prune -exec rm -r {} + \
    && find /opt/consignee -name '*.py[ix]' -delete


FROM ${BASE_IMAGE}
# By number: orchestrators that demand a non-root user cannot look a name up.
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/consignee && install -d /etc/consignee
COPY --from=build /opt/consignee /opt/consignee

# SQLite spills large sorts to a file; with a read-only root only the volume can take it.
ENV PATH=/opt/consignee/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    SQLITE_TMPDIR=/var/lib/consignee \
    CONSIGNEE_DATA_DIR=/var/lib/consignee \
    CONSIGNEE_HOST=0.0.0.0 \
    CONSIGNEE_PORT=8080

# consignee.toml is read from here when one is mounted.
WORKDIR /etc/consignee
VOLUME /var/lib/consignee
EXPOSE 8080
USER 10001:10001
STOPSIGNAL SIGTERM
# Each check is a process of its own, about a second of one core.
HEALTHCHECK --interval=30s --timeout=15s --start-period=30s --retries=3 CMD ["consignee", "readyz"]
ENTRYPOINT ["consignee"]
CMD ["serve", "--migrate"]
