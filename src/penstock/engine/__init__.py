# SPDX-License-Identifier: Apache-2.0
"""The engine: plan -> order -> backends -> delivery. `docs/design/` explains each."""
