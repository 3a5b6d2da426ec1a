from ragkv.evals.kernels.timing import table


def test_rows_become_a_table():
    lines = [
        '{"by": "triton", "ms": 0.5, "unit": "GB/s"}\n',
        "a warning\n",
        '{"by": "copy", "ms": 12.25, "unit": "GB/s"}\n',
    ]
    assert table(lines) == "by      ms     unit\ntriton  0.5    GB/s\ncopy    12.25  GB/s"
