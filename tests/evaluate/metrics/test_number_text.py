"""Numbers, times and sizes as a person reads them."""

import pytest

from caveat.evaluate.metrics import format_bytes, format_error, format_number, format_seconds


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (format_number(0.9722), "0.972"),
        (format_number(0.00414), "0.0041"),
        (format_number(-3.2e-6), "−3.2e−06"),
        (format_number(12345.6), "12,346"),
        (format_number(None), "–"),
        (format_error(0.02), "0.020"),
        (format_error(9.96), "10"),
        (format_error(0.0), "0"),
        (format_seconds(0), "0 s"),
        (format_seconds(0.0000312), "31.2 µs"),
        (format_seconds(0.0312), "31.2 ms"),
        (format_seconds(200), "3 min 20 s"),
        (format_seconds(9000), "2.5 h"),
        (format_bytes(812), "812 B"),
        (format_bytes(999_900), "1 MB"),
        (format_bytes(40_200), "40.2 kB"),
    ],
)
def test_numbers_a_person_reads(written, expected):
    assert written == expected
