# SPDX-License-Identifier: Apache-2.0
"""Contract suites: what every implementation of a seam has to pass, as pytest classes.

`StoreContract` is in `penstock.testing.stores`, which needs what stores need.
"""

from __future__ import annotations

from penstock.testing.backends import BackendContract

__all__ = ["BackendContract"]
