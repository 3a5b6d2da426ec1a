import pytest
from implementations import interpreter


@pytest.fixture(autouse=True)
def interpreted():
    with interpreter():
        yield
