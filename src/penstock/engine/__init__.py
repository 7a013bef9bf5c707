# SPDX-License-Identifier: Apache-2.0
"""The engine: plan -> scheduler -> backends -> delivery. `docs/design/` explains each."""
