# SPDX-License-Identifier: Apache-2.0
"""Records in LMDB files."""
