# SPDX-License-Identifier: Apache-2.0
"""Stores of records in shards: a few large objects instead of millions of small ones."""
