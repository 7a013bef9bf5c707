# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that replaces torch's `DataLoader` by Penstock's for a whole test run.

    pytest -p penstock.testing.dropin

pytest imports the plugin before the tests and their conftest.py, so they find Penstock's class
under torch's names.
"""

from __future__ import annotations

from penstock.torch.replacement import install

install()
