"""Log-probability columns, cut into tokens."""

from __future__ import annotations

import pytest

from octavo_router.plan import LogprobColumns
from octavo_router.request import TokenLogprobs


def test_each_token_gets_its_likeliest() -> None:
    columns = LogprobColumns([-1.0, -2.0, -3.0], [2, 0, 1], [4, 5, 6], [-1.0, -1.5, -0.5])
    assert columns.unpack([4, 8, 9]) == [
        TokenLogprobs(4, -1.0, ((4, -1.0), (5, -1.5))),
        TokenLogprobs(8, -2.0),
        TokenLogprobs(9, -3.0, ((6, -0.5),)),
    ]


@pytest.mark.parametrize(
    "columns",
    [
        LogprobColumns([-1.0], [0], [], []),
        LogprobColumns([-1.0, -2.0], [0], [], []),
        LogprobColumns([-1.0, -2.0], [0, 1], [4], []),
        LogprobColumns([-1.0, -2.0], [0, 0], [4], [-1.0]),
        LogprobColumns([-1.0, -2.0], [0, 2], [4], [-1.0]),
    ],
)
def test_columns_that_do_not_fit(columns: LogprobColumns) -> None:
    with pytest.raises(ValueError, match=r"argument|counted"):
        columns.unpack([1, 2])
