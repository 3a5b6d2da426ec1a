import pytest

from ragkv.evals.bucket import new_bucket, s3_server


@pytest.fixture(scope="session")
def s3_port():
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port):
    with new_bucket(s3_port) as bucket:
        yield bucket
