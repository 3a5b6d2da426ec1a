import pytest
from bucket import new_bucket, s3_server


@pytest.fixture(scope="session")
def s3_port():
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port, monkeypatch):
    with new_bucket(s3_port, monkeypatch) as bucket:
        yield bucket
