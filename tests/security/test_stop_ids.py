"""Stop token ids outside the vocabulary."""

from __future__ import annotations

import pytest

from tests.security.oracle import VOCABULARY, refused_everywhere


@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 2**31, 2**63, 1.0, True, "1"])
@pytest.mark.parametrize("more", [{}, {"min_tokens": 2, "max_tokens": 4}])
def test_a_stop_id_that_is_no_token_is_refused(server, token_id, more):
    refused_everywhere(server, {"stop_token_ids": [token_id]} | more, param="stop_token_ids")


def test_the_last_token_of_the_vocabulary_may_stop(server):
    assert server.post("/v1/completions", {"prompt": "a", "stop_token_ids": [VOCABULARY - 1]}).status == 200
