# SPDX-License-Identifier: Apache-2.0
"""Contract suites: what every store has to pass, as pytest classes; see `penstock.testing.stores`.

`StoreReaderContract` is for a store that is only read, `StoreContract` for one with a writer.
"""

from __future__ import annotations

from penstock.deprecation import removed_names

__getattr__ = removed_names(__name__, {"BackendContract": "nothing: backends are Penstock's own"})
