# SPDX-License-Identifier: Apache-2.0
"""Contract suites: what every implementation of a seam has to pass, as pytest classes.

`penstock.testing.stores` needs what stores need: `StoreReaderContract` is for a store that is only
read, `StoreContract` for a store with a writer.
"""

from __future__ import annotations

from penstock.testing.backends import BackendContract

__all__ = ["BackendContract"]
