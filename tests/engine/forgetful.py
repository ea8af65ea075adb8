"""A connector that stores all and never serves anything."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class ForgetfulConnector(OffloadingConnector):
    def get_num_new_matched_tokens(self, *_args: Any, **_kwargs: Any) -> tuple[int, bool]:
        return 0, False
