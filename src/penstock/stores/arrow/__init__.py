# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow files."""
